"""The admin APIs without their secret, on both protocols and in every spelling of a path or a header."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from attack_suite.victim import SECRET_BYTES, Broken, Victim

_CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
_CONFIG = {"name": "intruder", "backend": "python", "max_batch_size": 0, "input": [], "output": []}
_SHM = {"key": "/psm_none", "offset": 0, "byte_size": 64}


def load_body(mark: str) -> str:
    """A load request that brings its own Python code; the code makes the file `mark` when it is run."""
    code = base64.b64encode(_CODE.format(mark=mark).encode()).decode()
    parameters = {"config": json.dumps(_CONFIG), "file:1/model.py": code}
    return json.dumps({"parameters": parameters})


def _must_be_closed(what: str, status: int, body: bytes = b"") -> None:
    if status not in (400, 403, 404, 405):
        raise Broken(f"{what}: {status} {body[:200]!r}")


def load_over_http(victim: Victim) -> str:
    """Load a model as a program and as a web page would: by a simple request, which a browser sends without asking."""
    body = load_body("/nonexistent/mark")
    page = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    for headers in ({"Content-Type": "application/json"}, page):
        status, reply = victim.send("POST", "/v2/repository/models/intruder/load", body, headers)
        if status != 403:
            raise Broken(f"{headers}: {status} {reply[:200]!r}")
    asks = {"Origin": page["Origin"], "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "kimi-admin"
    status, reply = victim.send("OPTIONS", "/v2/repository/models/intruder/load", b"", asks)
    if status < 400 or b"allow-origin" in reply.lower():
        raise Broken(f"a browser that asks whether a page may send the header: {status} {reply[:200]!r}")
    return "403 as JSON, as text/plain of another origin, and to a browser that asks"


def spellings(victim: Victim) -> str:
    """Other spellings of the path, other methods, and headers that are nearly the right one."""
    paths = (
        "/v2/repository/models/spec_ensemble/unload",
        "/v2//repository/models/spec_ensemble/unload",
        "//v2/repository/models/spec_ensemble/unload",
        "/v2/repository/models/spec_ensemble/unload/",
        "/v2/repository/models/spec_ensemble/unload?x=1",
        "/v2/repository/models/spec_ensemble/../spec_ensemble/unload",
        "/v2/%72epository/models/spec_ensemble/unload",
        "/V2/REPOSITORY/models/spec_ensemble/unload",
        "/v2/repository/repo/models/spec_ensemble/unload",
    )
    half = victim.admin_secret[:-1]
    headers: tuple[dict[str, str], ...] = (
        {},
        {"kimi-admin": ""},
        {"kimi-admin": half},
        {"kimi-admin": victim.admin_secret + "x"},
        {"kimi-admin": f"{victim.admin_secret},x"},
        {"x-kimi-admin": victim.admin_secret},
        {"triton-grpc-protocol-kimi-admin": victim.admin_secret},
    )
    for path in paths:
        for method in ("POST", "GET", "PUT"):
            for header in headers:
                status, reply = victim.send(method, path, b"{}", header)
                _must_be_closed(f"{method} {path} {list(header)}", status, reply)
    return f"{len(paths)} paths, {len(headers)} headers, 3 methods"


def other_groups_over_http(victim: Victim) -> str:
    """Shared memory, trace, logging and the index of the repository."""
    requests: tuple[tuple[str, str, Any], ...] = (
        ("POST", "systemsharedmemory/region/mine/register", _SHM),
        ("GET", "systemsharedmemory/status", None),
        ("POST", "systemsharedmemory/unregister", {}),
        ("POST", "cudasharedmemory/region/mine/register", {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 64}),
        ("GET", "cudasharedmemory/status", None),
        ("POST", "trace/setting", {"trace_file": "/tmp/mine", "trace_level": ["TENSORS"]}),
        ("POST", "models/spec_ensemble/trace/setting", {"trace_level": ["TENSORS"], "trace_rate": "1"}),
        ("GET", "trace/setting", None),
        ("POST", "logging", {"log_file": "/tmp/mine"}),
        ("GET", "logging", None),
        ("POST", "repository/index", {}),
    )
    for method, path, fields in requests:
        status, reply = victim.send(method, f"/v2/{path}", "" if fields is None else json.dumps(fields))
        if status != 403:
            raise Broken(f"{method} {path}: {status} {reply[:200]!r}")
    return f"403 for {len(requests)}"


def groups_over_grpc(victim: Victim) -> str:
    """The same over gRPC; a wrong secret, HTTP's header name and another case count as none."""
    bad: tuple[dict[str, str], ...] = (
        {},
        {"kimi-admin": victim.admin_secret},
        {"triton-grpc-protocol-kimi-admin": victim.admin_secret[:-1]},
        {"triton-grpc-protocol-kimi-admin": ""},
    )
    client = victim.grpc()
    calls: tuple[Callable[[dict[str, str]], Any], ...] = (
        lambda h: client.load_model("intruder", headers=h, config=json.dumps(_CONFIG), files={"file:1/model.py": b""}),
        lambda h: client.unload_model("spec_ensemble", headers=h),
        lambda h: client.get_model_repository_index(headers=h),
        lambda h: client.register_system_shared_memory("mine", "/psm_none", 64, headers=h),
        lambda h: client.get_system_shared_memory_status(headers=h),
        lambda h: client.get_cuda_shared_memory_status(headers=h),
        lambda h: client.update_trace_settings("spec_ensemble", {"trace_level": ["TENSORS"]}, headers=h),
        lambda h: client.get_trace_settings(headers=h),
        lambda h: client.update_log_settings({"log_file": "/tmp/mine"}, headers=h),
        lambda h: client.get_log_settings(headers=h),
    )
    try:
        for number, call in enumerate(calls):
            for headers in bad:
                try:
                    call(headers)
                except InferenceServerException as error:
                    if "restricted" not in error.message():
                        raise Broken(f"call {number}: {error.message()}") from None
                else:
                    raise Broken(f"call {number} with {list(headers)} was answered")
    finally:
        client.close()
    return f"{len(calls)} calls, {len(bad)} headers"


def internal_shared_memory(victim: Victim) -> str:
    """The regions through which the server talks to its models, registered and read as a client's own."""
    names = sorted(path.name for path in Path("/dev/shm").glob(f"kimi_{victim.http_port}_*"))
    if not names:
        raise Broken("this server has no region, so nothing was tried")
    for name in names:
        body = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": 4096})
        status, reply = victim.send("POST", "/v2/systemsharedmemory/region/mine/register", body)
        if status != 403 or name.encode() in reply:
            raise Broken(f"{name}: {status} {reply[:200]!r}")
    _read_a_region(victim, names)
    return f"{len(names)} regions"


def _read_a_region(victim: Victim, names: list[str]) -> None:
    """Name a region as an input and as an output of a request; the error tells no region's name."""
    client = victim.grpc()
    try:
        given = grpcclient.InferInput("SECRET", [SECRET_BYTES], "UINT8")
        given.set_shared_memory("mine", SECRET_BYTES)
        output = grpcclient.InferRequestedOutput("REPLY")
        output.set_shared_memory("mine", 64)
        for arguments in ({"inputs": [given]}, {"inputs": [given], "outputs": [output]}):
            try:
                client.infer("kimi_target", **arguments)
            except InferenceServerException as error:
                if any(name in error.message() for name in names):
                    raise Broken(error.message()) from None
            else:
                raise Broken("a region that nobody registered was read")
    finally:
        client.close()


ACCESS_ATTACKS = (load_over_http, spellings, other_groups_over_http, groups_over_grpc, internal_shared_memory)
