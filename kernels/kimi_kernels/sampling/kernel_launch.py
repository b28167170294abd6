"""Scratch and launches of one sampling call, step by step.

Launches depend on shapes alone, so a CUDA graph may hold them: which rows are greedy, filter or use a processor is
read on the device, and a row that needs nothing of a kernel leaves it at once.
"""

import torch
import triton
from torch import Tensor

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.sampling.kernel_check import check_kernel
from kimi_kernels.sampling.kernel_draw import draw_kernel
from kimi_kernels.sampling.kernel_mask import mask_in_place
from kimi_kernels.sampling.kernel_process import copy_kernel, process_kernel
from kimi_kernels.sampling.kernel_rows import CANDIDATES, LISTED
from kimi_kernels.sampling.kernel_select import select_kernel
from kimi_kernels.sampling.kernel_tuning import TUNING, Splits, Tuning
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows, VocabularyMap


class SamplingCall:
    """Scratch of one call and the launches on it."""

    def __init__(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None,
        tuning: Tuning = TUNING,
    ) -> None:
        self.tuning = tuning
        self.logits, self.inputs, self.rows, self.vocabulary_map = logits, inputs, rows, vocabulary_map
        self.num_rows, self.num_columns = logits.shape
        self.splits = Splits.of(self.num_rows, self.num_columns, tuning)
        self.uses_work = rows.logit_mask is not None or any(
            entries.numel() for entries in (inputs.penalty_ids, inputs.bias_ids, inputs.ban_ids, inputs.bad_word_tokens)
        )
        num_parts = self.num_rows * self.splits.count
        # Tickets of two kernels, whether a processed row was not finite, the bound that splits share, and how many
        # tokens a row lists.
        # Each begins at a multiple of 16 bytes, whatever the rows: kernels are compiled anew for another alignment.
        self.zeros = torch.zeros(5, 4 * triton.cdiv(self.num_rows, 4), dtype=torch.int32, device=logits.device)
        self.part_score = self._new(num_parts, CANDIDATES.value, dtype=torch.float64)
        self.part_token = self._new(num_parts, CANDIDATES.value)
        self.part_best = self._new(num_parts, dtype=torch.float32)
        self.part_bad = self._new(num_parts)
        self.part_sums = self._new(num_parts, 4, dtype=torch.float32)
        self.tile_best = self._new(num_parts, self.splits.columns // tuning.draw_columns)
        self.part_mass = self._new(num_parts, 1 + CANDIDATES.value, dtype=torch.float64)
        self.maxima = self._new(num_parts, tuning.draw_columns // 4, dtype=torch.float32)
        self.threshold = self._new(self.num_rows)
        self.candidate = self._new(self.num_rows, CANDIDATES.value)
        self.row_best = self._new(self.num_rows, dtype=torch.float32)
        self.row_mass = self._new(self.num_rows, dtype=torch.float64)
        self.state = self._new(self.num_rows)
        self.list = self._new(self.num_rows, LISTED.value)
        self.token_ids = self._new(self.num_rows, dtype=torch.int64)
        self.status = self._new(self.num_rows)
        work_shape = (self.num_rows, self.num_columns) if self.uses_work else (1, 1)
        self.work = self._new(*work_shape, dtype=torch.float32)
        self.uses_work_rows = self._new(self.num_rows)

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.logits.device)

    @property
    def _token_of_column(self) -> Tensor:
        return self.status if self.vocabulary_map is None else self.vocabulary_map.token_id_of_column

    @property
    def _column_of_token(self) -> Tensor:
        return self.status if self.vocabulary_map is None else self.vocabulary_map.column_of_token_id

    @property
    def _num_tokens(self) -> int:
        return self.num_columns if self.vocabulary_map is None else self.vocabulary_map.column_of_token_id.numel()

    @property
    def cut(self) -> dict[str, int]:
        """The constants by which kernels that read whole rows cut them."""
        return {
            "SPLITS": self.splits.count,
            "SPLIT_COLUMNS": self.splits.columns,
            "EVEN": self.num_columns == self.splits.count * self.splits.columns,
            "SPLITS_P2": triton.next_power_of_2(self.splits.count),
            "BLOCKS": self.tuning.read_columns // 4,
            "STAGES": self.tuning.stages,
            "num_warps": self.tuning.read_warps,
        }

    @property
    def _kind(self) -> dict[str, bool]:
        kind = {"HAS_MAP": self.vocabulary_map is not None, "HAS_WORK": self.uses_work, "enable_fp_fusion": False}
        return kind | pdl_options(self.logits.device)

    def process(self) -> None:
        if not self.uses_work:
            return
        inputs, rows = self.inputs, self.rows
        copy_kernel[(self.num_rows * self.splits.count,)](
            self.logits, self.work, self.uses_work_rows, self.zeros[2], rows.sequence, inputs.penalty_offsets,
            inputs.bias_offsets, inputs.ban_offsets, inputs.bad_word_offsets,
            self.status if rows.mask_of_row is None else rows.mask_of_row, self.logits.stride(0), self.num_columns,
            SPLITS=self.splits.count, SPLIT_COLUMNS=self.splits.columns, BLOCK=self.tuning.read_columns,
            HAS_MASK=rows.mask_of_row is not None,
        )  # fmt: skip
        window_width = rows.window_token_ids.shape[1]
        process_kernel[(self.num_rows,)](
            self.work, self.uses_work_rows, rows.sequence, rows.token_index, rows.window_token_ids, rows.window_len,
            self._column_of_token, inputs.repetition_penalty, inputs.frequency_penalty, inputs.presence_penalty,
            inputs.penalty_offsets, inputs.penalty_ids, inputs.penalty_counts, inputs.penalty_in_prompt,
            inputs.bias_offsets, inputs.bias_ids, inputs.bias_values, inputs.ban_offsets, inputs.ban_ids,
            inputs.ban_until, inputs.bad_word_offsets, inputs.bad_word_token_offsets, inputs.bad_word_tokens,
            inputs.history_tail, self.num_columns, window_width, inputs.history_tail.shape[1],
            BLOCK=self.tuning.process_entries, WINDOW_P2=triton.next_power_of_2(max(window_width, 1)),
            HAS_MAP=self.vocabulary_map is not None, enable_fp_fusion=False,
        )  # fmt: skip
        if rows.logit_mask is not None and rows.mask_of_row is not None:
            mask_in_place(
                self.work,
                rows.logit_mask,
                rows.mask_of_row,
                keeps_bad=False,  # noted when it was copied
                token_of_column=None if self.vocabulary_map is None else self.vocabulary_map.token_id_of_column,
            )

    def draw(self) -> None:
        inputs, rows = self.inputs, self.rows
        draw_kernel[(self.num_rows * self.splits.count,)](
            self.logits, self.work, self.uses_work_rows, self.zeros[2], rows.sequence, rows.token_index,
            inputs.temperature, inputs.seed, inputs.top_k, inputs.top_p, inputs.min_p, self._token_of_column,
            self._column_of_token, self.part_score, self.part_token, self.part_best, self.part_bad, self.part_sums,
            self.tile_best, self.maxima, self.threshold.view(torch.uint32), self.zeros[3].view(torch.uint32),
            self.candidate, self.row_best, self.row_mass, self.state, self.zeros[0], self.token_ids, self.status,
            self.logits.stride(0), self.num_columns,
            **(self.cut | {"BLOCKS": self.tuning.draw_columns // 4, "num_warps": self.tuning.draw_warps}),
            **self._kind, maxnreg=self.tuning.draw_registers,
        )  # fmt: skip

    def check(self) -> None:
        check_kernel[(self.num_rows * self.splits.count,)](
            self.logits, self.work, self.uses_work_rows, self.rows.sequence, self.inputs.temperature,
            self.inputs.top_p, self.inputs.min_p, self._token_of_column, self._column_of_token, self.candidate,
            self.row_best, self.row_mass, self.tile_best, self.state, self.part_mass,
            self.threshold.view(torch.uint32), self.list, self.zeros[4], self.zeros[1], self.token_ids,
            self.logits.stride(0), self.num_columns, DRAW_COLUMNS=self.tuning.draw_columns, **self.cut, **self._kind,
        )  # fmt: skip

    def select(self) -> None:
        inputs, rows = self.inputs, self.rows
        select_kernel[(self.num_rows,)](
            self.logits, self.work, self.uses_work_rows, rows.sequence, rows.token_index, inputs.temperature,
            inputs.seed, inputs.top_k, inputs.top_p, inputs.min_p, self._column_of_token, self.candidate,
            self.row_best, self.state, self.list, self.zeros[4], self.token_ids, self.logits.stride(0),
            self.num_columns, self._num_tokens, BLOCK=self.tuning.select_columns, num_warps=self.tuning.select_warps,
            **self._kind,
        )  # fmt: skip
