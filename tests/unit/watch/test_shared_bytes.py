"""The metric of shared memory: the bytes of all segments of a kind."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from jurybox.protocol.segment import segment_name
from jurybox.server.gateway.metrics import exposition


def test_shared_memory_is_summed_by_kind(scene):
    taken = scene.snapshot()
    (board,) = taken.document["memory"]["segments"].values()
    more = {segment_name(scene.id, "weights"): 300, segment_name(scene.id, "arena", 3): 4000}
    more |= {segment_name(scene.id, "weights", 1): 500}
    segments = {**taken.document["memory"]["segments"], **more}
    document = {**taken.document, "memory": {**taken.document["memory"], "segments": segments}}
    body, _ = exposition(scene.snapshot(document=document), "")
    found = {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name == "jurybox_shared_memory_bytes"
    }
    assert found == {"scoreboard": board, "weights": 800, "arena": 4000}
