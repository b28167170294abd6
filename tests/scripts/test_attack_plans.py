"""The plans that attacks change are good ones to begin with."""

from attack_suite.plans import good_draft_plan, good_target_plan


def test_each_sequence_has_a_row_for_every_draft_token_and_one_more() -> None:
    plan = good_target_plan(3, 4, 100)
    assert plan.rows.query_lens.tolist() == plan.num_sampled_rows.tolist() == plan.num_given.tolist() == [5, 5, 5]
    assert plan.logit_mask is not None and plan.logit_mask.shape == (3, 4)
    assert plan.masked_rows.tolist() == [0, 5, 10]
    assert len(plan.rows.token_ids) == 15


def test_a_drafts_rows_are_those_of_its_aux_rows() -> None:
    plan = good_draft_plan(2, 3)
    assert len(plan.rows.token_ids) == len(plan.aux_rows)
