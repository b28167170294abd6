"""The router's product of few rows: in the interpreter in float16, marked `gpu` on a card in bf16."""

import pytest
import torch

from kimi_kernels.moe_route.kernel_gate import GATE_KIND, pack_gate, router_logits
from support.interpreted import INTERPRETED


def check(num_rows: int, num_experts: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = (torch.randn(num_experts, width, generator=generator) * width**-0.5).to(device, dtype)
    gate = pack_gate(weight)
    assert gate.kind == GATE_KIND
    for repeat in range(2):  # the counts are zero again after a call
        x = torch.randn(num_rows, width + 8, generator=generator).to(device, dtype)[:, :width]
        logits = router_logits(x, gate)
        assert logits.dtype == torch.float32 and logits.shape == (num_rows, num_experts)
        torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), rtol=2e-5, atol=2e-5), repeat


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "width"),
    [(1, 384, 1536), (4, 40, 520), (16, 32, 512), (33, 100, 1030), (64, 30, 100), (65, 30, 100), (0, 32, 512)],
)
class TestInterpreted:
    pytestmark = INTERPRETED

    def test_it_is_the_product_in_float32(self, num_rows: int, num_experts: int, width: int) -> None:
        check(num_rows, num_experts, width, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64, 65, 300])
def test_it_is_the_product_in_float32_on_a_card(num_rows: int) -> None:
    check(num_rows, 384, 7168, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_it_repeats_bit_for_bit_in_a_graph() -> None:
    weight = torch.randn(384, 7168, device="cuda").to(torch.bfloat16)
    x, gate = torch.randn(4, 7168, device="cuda").to(torch.bfloat16), pack_gate(weight)
    expected = router_logits(x, gate)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [router_logits(x, gate) for _ in range(20)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_a_float32_gate_is_multiplied_in_float32() -> None:
    weight, x = torch.randn(8, 64), torch.randn(3, 64)
    gate = pack_gate(weight)
    torch.testing.assert_close(router_logits(x, gate), x @ weight.t())
    narrow = x.to(torch.bfloat16)
    torch.testing.assert_close(router_logits(narrow, gate), narrow.float() @ weight.t())


def test_a_gate_of_another_set_is_named() -> None:
    from kimi_kernels import KernelSet

    foreign = KernelSet.reference().pack_linear(torch.randn(8, 64))
    with pytest.raises(ValueError, match=r"gate: got a weight packed as 'reference\.float32'"):
        router_logits(torch.randn(3, 64), foreign)
