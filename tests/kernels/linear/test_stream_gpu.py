"""Products of few rows that stream their weight: against float32, cut or not, and between kernels that start early."""

from dataclasses import replace

import pytest
import torch

from kimi_kernels.linear import kernel
from kimi_kernels.linear.stream_launch import MOST_ROWS, stream_launch
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
TOLERANCE = 4e-3
SHAPES = [(2112, 7168), (12288, 1536), (7168, 2048), (384, 7168), (36_864, 512), (100, 200), (65, 8), (1, 264)]
"""Shapes of Kimi-K2.5; fewer rows than a tile, fewer columns than a step, one more than either."""


def random_case(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, in_features, device="cuda").to(dtype)
    weight = (torch.randn(out_features, in_features, device="cuda") * in_features**-0.5).to(dtype)
    return x, weight, torch.zeros(-(-out_features // 64), dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 17, 40, 64])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_against_float32(num_rows: int, out_features: int, in_features: int) -> None:
    from kimi_kernels.linear.kernel_stream import stream_linear

    x, weight, arrivals = random_case(num_rows, out_features, in_features)
    expected = x.float() @ weight.float().T
    chosen = stream_launch(num_rows, out_features)
    bound = 1e-5 if out_features > 1 else 1e-4  # a row of one column may be near zero
    for splits in sorted({1, 4, chosen.splits}):
        launch = replace(chosen, splits=splits)
        out = stream_linear(x, weight, arrivals, launch, torch.float32)
        assert worst_row_error(out, expected) < bound, splits
        assert torch.equal(stream_linear(x, weight, arrivals, launch), out.bfloat16()), "another order of sums"
        assert not arrivals.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_apart_from_each_other(dtype: torch.dtype) -> None:
    """Rows with strides; NaN in one is NaN in no other; a row's bits are the same with other rows and alone."""
    from kimi_kernels.linear.kernel_stream import stream_linear

    x, weight, arrivals = random_case(16, 2112, 1544, dtype)
    wide = torch.full((16, 2000), float("nan"), device="cuda", dtype=dtype)
    wide[:, :1544] = x
    wide[3, 5] = float("nan")
    out = stream_linear(wide[:, :1544], weight, arrivals, stream_launch(16, 2112))
    assert out[3].isnan().all()
    for num_rows in (1, 3, 8, 12):
        few = stream_linear(x[:num_rows], weight, arrivals, stream_launch(num_rows, 2112))
        rows = [row for row in range(num_rows) if row != 3]
        assert torch.equal(few[rows], out[rows]), num_rows


def test_linear_takes_it_for_few_rows_of_a_large_weight() -> None:
    """The same bits as the kernel's own, up to the most rows; cuBLAS above, and for rows that lie askew."""
    from kimi_kernels.linear.kernel_stream import stream_linear

    x, weight, _ = random_case(MOST_ROWS + 1, 2112, 7168)
    packed = kernel.pack_linear(weight)
    own = stream_linear(x[:MOST_ROWS], weight, packed.tensors[1], stream_launch(MOST_ROWS, 2112))
    assert torch.equal(kernel.linear(x[:MOST_ROWS], packed), own)
    assert torch.equal(kernel.linear(x, packed), torch.nn.functional.linear(x, weight))
    askew = torch.empty(4 * 7168 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(4, 7168).copy_(x[:4])
    assert torch.equal(kernel.linear(askew, packed), torch.nn.functional.linear(askew, weight))
    assert kernel.linear(x[:0], packed).shape == (0, 2112)
    logits = kernel.logits(x[:4], packed)
    assert logits.dtype == torch.float32
    assert worst_row_error(logits, x[:4].float() @ weight.float().T) < 1e-5


def test_a_head_streams_for_more_rows() -> None:
    """A row's bits are the same alone, with a few others and with many."""
    x, weight, _ = random_case(64, 65_600, 264)
    packed = kernel.pack_linear(weight)
    logits = kernel.linear(x, packed)
    assert worst_row_error(logits, x.float() @ weight.float().T) < TOLERANCE
    for num_rows in (1, 16, 17, 32, 63):
        assert torch.equal(kernel.linear(x[:num_rows], packed), logits[:num_rows]), num_rows


def test_between_kernels_that_start_early() -> None:
    """A chain in a CUDA graph, with a branch: each starts before the one before has ended and uses its result."""
    from kimi_kernels.rms_norm.kernel import rms_norm
    from kimi_kernels.silu_mul.kernel import silu_mul

    x, up, _ = random_case(4, 4096, 1024)
    down = random_case(4, 1024, 2048)[1]
    packed_up, packed_down = kernel.pack_linear(up), kernel.pack_linear(down)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    side, stream = torch.cuda.Stream(), torch.cuda.Stream()

    def layers() -> torch.Tensor:
        hidden = x
        for _ in range(12):
            normed = rms_norm(hidden, gain, 1e-6)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                beside = kernel.linear(silu_mul(kernel.linear(normed, packed_up)), packed_down)
            ahead = kernel.linear(silu_mul(kernel.linear(normed, packed_up_too)), packed_down_too)
            stream.wait_stream(side)
            hidden = rms_norm(ahead + beside, gain, 1e-6)
        return hidden

    packed_up_too, packed_down_too = kernel.pack_linear(-up), kernel.pack_linear(down)
    with torch.cuda.stream(stream):
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = layers()
        graph.capture_end()
    for seed in range(20):
        torch.manual_seed(seed)
        x.normal_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        with torch.cuda.stream(stream):
            expected = layers()
        torch.cuda.synchronize()
        assert torch.equal(replayed, expected), seed
