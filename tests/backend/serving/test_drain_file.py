"""The two files by which a server is drained."""

import pytest

from kimi_backend.serving.drain_file import DrainFile


def test_an_order_and_reports_travel_both_ways(tmp_path):
    runs_it, model = DrainFile(tmp_path / "drain"), DrainFile(tmp_path / "drain")
    assert (model.limit_s, runs_it.num_left) == (None, None)
    runs_it.order(7.5)
    model.report(12)
    assert (model.limit_s, runs_it.num_left) == (7.5, 12)
    runs_it.order(0)
    model.report(0)
    assert (model.limit_s, runs_it.num_left) == (0, 0)


@pytest.mark.parametrize("text", ["", "now", "nan"])
def test_a_file_without_a_number_gives_no_time(tmp_path, text):
    (tmp_path / "drain").write_text(text)
    assert DrainFile(tmp_path / "drain").limit_s == 0
