"""The dashboard's picture: every panel finds a place, however many there are."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PANELS = json.loads((ROOT / "docker/grafana/dashboards/kimi.json").read_text())["panels"]


@pytest.mark.parametrize("num_panels", [1, 4, 5, len(PANELS)])
def test_every_panel_is_drawn(num_panels, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import dashboard_picture  # imports matplotlib, for which no other test waits

    dashboard = tmp_path / "dashboard.json"
    dashboard.write_text(json.dumps({"panels": PANELS[:num_panels]}))
    series = {"metric": {}, "values": [[100.0, "1"], [102.0, "2"]]}
    monkeypatch.setattr(dashboard_picture, "DASHBOARD", dashboard)
    monkeypatch.setattr(dashboard_picture, "query_range", lambda *_: [series])
    picture = tmp_path / "picture.png"
    dashboard_picture.draw_dashboard("", 100.0, 110.0, "a title", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    drawn = [line.rsplit(":", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert drawn == [panel["title"] for panel in PANELS[:num_panels]]
