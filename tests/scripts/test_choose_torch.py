import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "choose_torch.py"
spec = importlib.util.spec_from_file_location("choose_torch", SCRIPT)
assert spec is not None and spec.loader is not None
choose_torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(choose_torch)


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["2.15.0", "2.13.0+cpu", "2.13.0", "2.11.0"], "torch==2.13.0+cpu"),
        (["2.15.0+cpu", "2.12.1+cpu", "2.11.0+cpu"], "torch==2.12.1+cpu"),
        (["2.15.0", "2.13.0", "2.11.0"], "torch==2.11.0"),
        (["2.15.0+cpu", "2.11.0"], "torch==2.11.0"),
        (["2.10.0+cpu"], "torch==2.11.0"),
    ],
)
def test_a_cpu_build_is_taken_where_there_is_one_and_else_the_cuda_build_that_fits(
    versions: list[str], chosen: str
) -> None:
    assert choose_torch.requirement(versions) == chosen


@pytest.mark.parametrize(
    ("version", "requirements", "fits"),
    [
        ("2.11.0+cu130", ["filelock", 'triton==3.6.0; platform_system == "Linux"'], True),
        ("2.13.0", ['triton==3.7.1; platform_system == "Linux"'], False),
        ("2.13.0+cpu", ["filelock"], True),
        ("2.10.0+cpu", ["filelock"], False),
    ],
)
def test_an_installed_torch_stays_if_its_triton_language_is_that_of_the_kernels(
    version: str, requirements: list[str], fits: bool
) -> None:
    assert choose_torch.fits(version, requirements) is fits
