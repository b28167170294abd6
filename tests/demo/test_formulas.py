"""The trainer's own shortcuts against the plain formulas they stand for."""

from pathlib import Path

import pytest
import torch

from kimi_kernels.quantization.plain import dequantize_int4, quantize_int4
from kimi_nano.export import bake, read_target, rounding_source, unbake, write_target
from kimi_nano.formulas import all_experts, chosen_experts, fake_int4, route
from kimi_nano.head_divergence import Teacher, head_divergence, teacher_of
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share, ends_in_loop, is_looping, lookup_draft


def test_rounding_in_training_is_the_files_rounding() -> None:
    weight = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :32] = 0
    assert torch.equal(fake_int4(weight), dequantize_int4(quantize_int4(weight)))


def test_training_can_go_on_from_rounded_weights() -> None:
    """The weights of a file, taken up again, round to themselves; rounding them once more does not."""
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


def plain_loss(logits: torch.Tensor, teacher: Teacher, share: float) -> torch.Tensor:
    p, q = teacher.probabilities, logits.softmax(-1)
    sharp_p, sharp_q = ((x.log() * teacher.sharpness[:, None]).softmax(-1) for x in (p, q))
    p_drawn, q_drawn = (x.gather(1, teacher.draws[:, None]) for x in (sharp_p, sharp_q))
    agree = 1 / torch.maximum(sharp_p, p_drawn * sharp_q / q_drawn).sum(-1)
    divergence = (p * (p.log() - q.log())).sum(-1)
    return ((1 - share) * divergence + share * (1 - agree)).mean()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_drafts_loss_and_its_gradients_are_autograds(share: float) -> None:
    generator = torch.Generator().manual_seed(2)
    normed = torch.randn(7, 8, generator=generator, requires_grad=True)
    head = torch.randn(20, 8, generator=generator, requires_grad=True)
    rows, columns = torch.randn(7, 8, generator=generator), torch.randn(20, 8, generator=generator)
    teacher = teacher_of(rows, columns, torch.tensor([1.0, 1.0, 1.0, 1 / 0.6, 1 / 0.6, 2.5, 2.5]), torch.float32)
    loss = head_divergence(normed, head, teacher, torch.tensor(share), torch.float32)
    wanted = plain_loss(normed @ head.T, teacher, share)
    torch.testing.assert_close(loss, wanted)
    gradients = torch.autograd.grad(3 * loss, (normed, head))
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * wanted, (normed, head)))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_loss_of_coupled_draws_is_how_often_they_differ(temperature: float) -> None:
    torch.manual_seed(3)
    count, identity = 20_000, torch.eye(6)
    target, draft = torch.randn(6) * 1.5, torch.randn(6) * 1.5
    teacher = teacher_of(target.expand(count, -1), identity, torch.full((count,), 1 / temperature), torch.float32)
    loss = head_divergence(draft.expand(count, -1), identity, teacher, torch.tensor(1.0), torch.float32)
    noise = -torch.log(torch.empty(count, 6).exponential_())
    differ = ((target / temperature + noise).argmax(1) != (draft / temperature + noise).argmax(1)).float().mean()
    assert 0.1 < differ < 0.9 and abs(float(loss - differ)) < 0.02
    shares = torch.bincount(teacher.draws, minlength=6) / count
    torch.testing.assert_close(shares, (target / temperature).softmax(0), atol=0.015, rtol=0)


def test_prompt_lookup_takes_the_longest_and_latest_match() -> None:
    assert lookup_draft([1, 2, 3, 9, 2, 3, 4, 5, 2, 3], 3) == [4, 5, 2]
    assert lookup_draft([1, 2, 3, 9, 8, 7, 1, 2, 3], 2) == [9, 8]
    assert lookup_draft([1, 2, 3], 2) == []


def test_a_loop_has_few_distinct_4grams() -> None:
    assert distinct_4gram_share([1, 2] * 20) < 0.1
    assert distinct_4gram_share(list(range(20))) == 1


def test_a_text_loops_when_it_ends_in_a_run_three_times_over() -> None:
    some = list(range(100, 160))
    run = list(range(10))
    assert ends_in_loop([*some, *run, *run, *run])
    assert ends_in_loop([*some, *run[5:], *run, *run, *run[:5]])  # the cut may fall anywhere in the run
    assert ends_in_loop([*some, *[7] * 24])
    assert not ends_in_loop([*some, *[7] * 23])
    assert not ends_in_loop([*some, *run, *run])
    assert not ends_in_loop([*run, *run, *run, *some])
    assert is_looping(torch.tensor([[*some, *run * 3], [*some, *run * 2, *some[:10]]])).tolist() == [True, False]


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
