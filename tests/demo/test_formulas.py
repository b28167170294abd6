"""The trainer's own shortcuts against the plain formulas they stand for."""

from pathlib import Path

import torch

from kimi_kernels.quantization.reference import dequantize_int4, quantize_int4
from kimi_nano.export import bake, read_target, rounding_source, unbake, write_target
from kimi_nano.formulas import all_experts, chosen_experts, fake_int4, route
from kimi_nano.head_divergence import head_divergence, teacher_probabilities
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share, lookup_draft


def test_rounding_in_training_is_the_files_rounding() -> None:
    weight = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :32] = 0
    assert torch.equal(fake_int4(weight), dequantize_int4(quantize_int4(weight)))


def test_training_can_go_on_from_rounded_weights() -> None:
    """What a file holds, taken up again, rounds to itself; rounding it once more does not."""
    baked = fake_int4(torch.randn(3, 64, 192, generator=torch.Generator().manual_seed(0)))
    again = fake_int4(rounding_source(baked)) != baked
    assert (fake_int4(baked) != baked).float().mean() > 0.3
    assert again.float().mean() < 0.001


def test_the_gradient_passes_the_rounding() -> None:
    weight = torch.randn(4, 32, requires_grad=True)
    (fake_int4(weight) * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 32), 3.0))


def test_experts_by_token_are_all_experts_weighed() -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = torch.randn(9, 16, generator=generator), torch.randn(4, 16, generator=generator)
    gate_up, down = torch.randn(4, 24, 16, generator=generator), torch.randn(4, 16, 12, generator=generator)
    weights, load = route(x, gate, torch.zeros(4), 2, True, 2.827)
    assert load.sum() == 18
    torch.testing.assert_close(weights.sum(dim=1), torch.full((9,), 2.827))
    torch.testing.assert_close(
        chosen_experts(x, weights, gate_up, down, torch.float32), all_experts(x, weights, gate_up, down, torch.float32)
    )


def test_the_bias_chooses_and_does_not_weigh() -> None:
    x, gate = torch.ones(1, 4), torch.zeros(3, 4)
    weights, _ = route(x, gate, torch.tensor([0.0, 0.0, 1.0]), 1, False, 1.0)
    assert weights.tolist() == [[0.0, 0.0, 0.5]]


def test_the_divergence_and_its_gradients_are_autograds() -> None:
    generator = torch.Generator().manual_seed(2)
    normed = torch.randn(7, 8, generator=generator, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, requires_grad=True)
    target_normed, target_head = torch.randn(7, 8, generator=generator), torch.randn(20, 8, generator=generator)
    teacher, entropy = teacher_probabilities(target_normed, target_head, torch.float32)
    divergence = head_divergence(normed, head, teacher, entropy, torch.float32)
    wanted = torch.nn.functional.kl_div((normed @ head.T).log_softmax(-1), teacher, reduction="batchmean")
    torch.testing.assert_close(divergence, wanted)
    gradients = torch.autograd.grad(3 * divergence, (normed, head))
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * wanted, (normed, head)))


def test_prompt_lookup_takes_the_longest_and_latest_match() -> None:
    assert lookup_draft([1, 2, 3, 9, 2, 3, 4, 5, 2, 3], 3) == [4, 5, 2]
    assert lookup_draft([1, 2, 3, 9, 8, 7, 1, 2, 3], 2) == [9, 8]
    assert lookup_draft([1, 2, 3], 2) == []


def test_a_loop_has_few_distinct_4grams() -> None:
    assert distinct_4gram_share([1, 2] * 20) < 0.1
    assert distinct_4gram_share(list(range(20))) == 1


def test_a_written_target_holds_its_trainings_rounding(tmp_path: Path) -> None:
    """The file's experts are the ones that the last steps of training computed with: rounded once."""
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config())
    (tmp_path / "tokenizer").mkdir()
    write_target(tmp_path / "written", target, MICRO, tmp_path / "tokenizer")
    read = read_target(tmp_path / "written")
    bake(target)
    for name, weight in target.weights.items():
        assert torch.equal(read.weights[name], weight), name
    unbake(read)
    write_target(tmp_path / "again", read, MICRO, tmp_path / "tokenizer")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("written", "again")]
    assert files[0] == files[1]
