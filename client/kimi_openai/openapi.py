"""The OpenAPI 3.1 description of the endpoint, out of its table of routes and the models of its bodies."""

from typing import Any

from pydantic.json_schema import models_json_schema

from kimi_openai.routes import ROUTES, ApiRoute

_SCHEMAS = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_CLIENT_ERRORS = ("400", "401", "403", "404", "408", "413", "429")
_SERVER_ERRORS = ("500", "503", "504")


def describe() -> dict[str, Any]:
    """The document, as JSON values."""
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kimi openai", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    errors = {status: _json("an error", "Error") for status in (*_CLIENT_ERRORS, *_SERVER_ERRORS)}
    answer: dict[str, Any] = {"description": "the answer", "content": {"application/json": {"schema": {}}}}
    if route.may_stream:
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.does,
        "responses": {"200": answer, **errors},
    }
    if route.needs_key:
        operation["security"] = [{}, {"key": []}]
    if route.body is not None:
        content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=route.body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{name}" in route.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _json(what: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=schema)}}}
    return {"description": what, "content": content}
