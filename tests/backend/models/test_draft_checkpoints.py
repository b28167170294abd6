"""A draft takes some tensors from its file, others from its target, and refuses the rest."""

import pytest
import torch

from kimi_backend.errors import CheckpointError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from support.draft_steps import DraftSteps, build_draft, build_stored_draft
from support.target_steps import build_target
from support.tiny_checkpoints import Tensors, random_draft, random_target
from support.tiny_configs import draft_config, target_config

TARGET = target_config()
CONFIG = draft_config("mla", TARGET)


def run(draft: Eagle3Draft) -> torch.Tensor:
    aux = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(0))
    return DraftSteps(draft, [8]).step([(0, [3, 1, 4, 1, 5])], [draft.combine_aux(aux)])[0][0]


def test_matrices_that_the_file_lacks_come_from_the_target() -> None:
    target_tensors = random_target(TARGET)
    shared = build_target(TARGET, target_tensors).get_embed_and_head()
    draft = build_draft(CONFIG, random_draft(CONFIG, with_embed=False, with_head=False))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: the draft's file lacks it"):
        run(draft)
    draft.set_embed_and_head(shared)
    own = random_draft(CONFIG, with_embed=False, with_head=False)
    own["embed_tokens.weight"] = target_tensors["model.embed_tokens.weight"]
    own["lm_head.weight"] = target_tensors["lm_head.weight"]
    assert torch.equal(run(draft), run(build_draft(CONFIG, own)))


def test_bit_equal_matrices_are_shared_and_others_kept() -> None:
    target_tensors = random_target(TARGET)
    shared = build_target(TARGET, target_tensors).get_embed_and_head()
    tensors = random_draft(CONFIG)
    tensors["embed_tokens.weight"] = target_tensors["model.embed_tokens.weight"].clone()
    draft = build_draft(CONFIG, tensors)
    own_head = draft.get_embed_and_head().head
    draft.set_embed_and_head(shared)
    assert draft.get_embed_and_head().embed is shared.embed
    assert draft.get_embed_and_head().head is own_head


def test_a_head_of_another_vocabulary_cannot_come_from_the_target() -> None:
    config = draft_config("mla", TARGET, draft_vocab_size=48)
    draft = build_draft(config, random_draft(config, with_head=False))
    shared = build_target(TARGET, random_target(TARGET)).get_embed_and_head()
    with pytest.raises(CheckpointError, match=r"lm_head.weight: .*\[96, 64\], expected \[48, 64\]"):
        draft.set_embed_and_head(shared)


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_both_names_of_the_layer_load(kind: str) -> None:
    config = draft_config(kind, TARGET)
    drafts = [
        build_stored_draft(config, random_draft(config, layer_prefix=name)) for name in ("layers.0.", "midlayer.")
    ]
    assert torch.equal(run(drafts[0]), run(drafts[1]))


def with_narrow_fc(tensors: Tensors) -> Tensors:
    return tensors | {"fc.weight": torch.ones(64, 128)}


def without_hidden_norm(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "hidden_norm" not in name}


def with_undoubled_attention(tensors: Tensors) -> Tensors:
    return tensors | {"layers.0.self_attn.q_a_proj.weight": torch.ones(32, 64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_narrow_fc, r"fc\.weight: expected shape \[64, 192\], found \[64, 128\]"),
        (without_hidden_norm, r"'layers\.0\.hidden_norm\.weight' is missing"),
        (with_undoubled_attention, r"q_a_proj\.weight: expected shape \[32, 128\], found \[32, 64\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: object, message: str) -> None:
    assert callable(change)
    with pytest.raises(CheckpointError, match=message):
        build_draft(CONFIG, change(random_draft(CONFIG)))


def test_fc_norm_without_its_weights_is_refused() -> None:
    config = draft_config("mla31", TARGET)
    with pytest.raises(CheckpointError, match=r"fc_norm\.0\.weight"):
        build_draft(config, random_draft(CONFIG))
