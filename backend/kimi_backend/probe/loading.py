"""Loads what `probe.probing` works on: the target once, the draft under each setting."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.config.chosen_configs import draft_overrides
from kimi_backend.config.draft_config import DraftOverrides, Eagle3MlaDraftConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.probe.probing import ProbeResult, ProbeText, ProbeTexts, probe, write_texts
from kimi_backend.probe.settings import ProbeSetting, candidate_settings, layers_to_keep
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.load.placement import Placement, place
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner

SINGLE_RANK = SingleRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedProbe:
    """A target in memory, a draft's files, and the settings to try."""

    target: KimiTarget
    target_runner: TargetRunner
    settings: ServingSettings
    draft: DraftCheckpoint
    placement: Placement
    group: TensorParallelGroup
    limits: RunnerLimits
    candidates: list[ProbeSetting]
    layers: tuple[int, ...]

    @property
    def config_aux(self) -> tuple[int, ...]:
        """R(j) as the draft's file says."""
        return self.draft.config.aux_layer_ids

    def write_texts(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, advance: Callable[[], None] = lambda: None
    ) -> ProbeTexts:
        """See `probe.write_texts`; `advance` is called after each text."""
        texts: list[ProbeText] = []
        for prompt in prompts:
            texts += write_texts(self.target_runner, self.layers, [prompt], num_tokens).texts
            advance()
        return ProbeTexts(layers=self.layers, hidden_size=self.target.config.hidden_size, texts=tuple(texts))

    def run(self, texts: ProbeTexts, num_draft_tokens: int) -> Iterator[ProbeResult]:
        """See `probe.probe`."""
        return probe(self.candidates, self.draft.config, self._load_draft, texts, num_draft_tokens)

    def _load_draft(self, overrides: DraftOverrides) -> DraftRunner:
        checkpoint = DraftCheckpoint.open(self.draft.path, self.target.config, overrides)
        config, place = checkpoint.config, self.placement
        args = (checkpoint.tensors, place.kernels, self.group, place.device, place.dtype)
        model: Eagle3Draft
        if isinstance(config, Eagle3MlaDraftConfig):
            model = Eagle3MlaDraft(config, *args)
        else:
            model = Eagle3MhaDraft(config, *args)
        model.set_embed_and_head(self.target.get_embed_and_head())
        pool = _pool(model.kv_pool_shape, self.settings, place, self.limits)
        return DraftRunner(model, place.kernels, pool, self.limits, place.dtype, group=self.group)


def open_probe(settings: ServingSettings, max_model_len: int, group: TensorParallelGroup = SINGLE_RANK) -> OpenedProbe:
    """Load the target, or this rank's part of it, and check the draft's files.

    Args:
        settings: must name checkpoint and draft; overrides of the draft's config would hide what is looked for.
        max_model_len: of the longest text, draft tokens included.
    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served.
    """
    if draft_overrides(settings) != DraftOverrides():
        raise ConfigError("setting draft_*: overrides given, none is allowed here: the probe tries them itself")
    placement, checkpoint = place(settings, group.rank), TargetCheckpoint.open(settings.checkpoint)
    draft = DraftCheckpoint.open(settings.draft, checkpoint.config)
    has_fc_norm = "fc_norm.0.weight" in draft.tensors.names()
    candidates = candidate_settings(draft.config, checkpoint.config.num_hidden_layers, has_fc_norm)
    layers = layers_to_keep(candidates, draft.config)
    limits = RunnerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens, max_num_seqs=1, max_model_len=max_model_len
    )
    with checkpoint.loading() as tensors:
        target = KimiTarget(checkpoint.config, tensors, placement.kernels, group, placement.device, placement.dtype)
    pool = _pool(target.kv_pool_shape, settings, placement, limits)
    return OpenedProbe(
        target=target,
        target_runner=TargetRunner(target, placement.kernels, pool, limits, layers, group=group),
        settings=settings,
        draft=draft,
        placement=placement,
        group=group,
        limits=limits,
        candidates=candidates,
        layers=layers,
    )


def _pool(
    shape: Callable[[int, int], tuple[int, ...]], settings: ServingSettings, placement: Placement, limits: RunnerLimits
) -> KvPool:
    """Room for one sequence."""
    num_blocks = -(-limits.max_model_len // settings.block_size) + 1
    return KvPool.allocate(shape, num_blocks, settings.block_size, placement.kv_dtype, placement.device)
