"""A run from end to end, and what later verbs make of it."""

import json

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
from colonnade.experts.bank import Bank, read_marker
from colonnade.router.sources import load_corpus

NUMBER, TEXT, WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer"}
MAYBE = {"type": ["number", "null"]}


def record(**fields):
    return {"type": "object", "properties": fields, "required": list(fields)}


SUMMARY = record(
    preset={"type": ["string", "null"]},
    seed=WHOLE,
    source=record(name=TEXT, train_items=WHOLE, calibration_items=WHOLE, heldout_items=WHOLE, unit=TEXT),
    router=record(
        areas={
            "type": "array",
            "items": record(
                name=TEXT,
                strategy=TEXT,
                experts=WHOLE,
                cold=WHOLE,
                max_over_mean=NUMBER,
                gini=NUMBER,
                effective_experts=NUMBER,
            ),
        },
        experts=WHOLE,
        cold_experts=WHOLE,
    ),
    expert=record(
        family=TEXT, head=TEXT, params_per_expert=WHOLE, params_sampled=WHOLE, params_exact=WHOLE, total_params=WHOLE
    ),
    estimator=record(name=TEXT, perturbations=WHOLE, evaluations_per_step=WHOLE),
    train=record(
        steps=WHOLE,
        expert_steps=WHOLE,
        seconds=NUMBER,
        expert_steps_per_second=MAYBE,
        probes_per_expert=WHOLE,
        failed_experts=WHOLE,
        backend=TEXT,
        device=TEXT,
        workers=WHOLE,
        peak_rss_mb=MAYBE,
    ),
    heldout=record(
        bits_per_byte=NUMBER,
        novel_bits_per_byte=MAYBE,
        interval={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
        best_area=NUMBER,
        untrained=NUMBER,
        frozen_body=MAYBE,
        oracle=NUMBER,
    ),
    baselines={"type": "object"},
    seconds_total=NUMBER,
)


def test_summary_matches_the_schema_and_stdout(trained):
    folder, result = trained
    summary = result.json()
    jsonschema.validate(summary, SUMMARY)
    assert json.loads((folder / "done" / "summary.json").read_text()) == summary
    low, high = summary["heldout"]["interval"]
    assert low - 1e-9 <= summary["heldout"]["bits_per_byte"] <= high + 1e-9
    assert summary["heldout"]["bits_per_byte"] < summary["heldout"]["untrained"]
    assert summary["heldout"]["oracle"] <= summary["heldout"]["best_area"]
    assert summary["router"]["experts"] == 18
    expert = summary["expert"]
    assert expert["params_sampled"] + expert["params_exact"] == expert["params_per_expert"]


def test_the_run_directory_is_what_the_design_says(trained):
    run = trained[0] / "done"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "relay", "router", "partition", "plan.json", "groups", "bank", "experts.parquet", "ensemble",
            "summary.json", "source", "logs", ".hydra"} <= names  # fmt: skip
    assert not [path for path in run.rglob("*.tmp")]
    assert sorted(path.name for path in (run / "groups").iterdir()) == [f"{g}.json" for g in range(6)]
    # nine experts in groups of four: the third group of each area is short, none crosses the areas
    assert [read_marker(run, g)["num_experts"] for g in range(6)] == [4, 4, 1, 4, 4, 1]


def test_experts_parquet_is_typed_and_complete(trained):
    table = pq.read_table(trained[0] / "done" / "experts.parquet")
    assert table.column("expert").to_pylist() == list(range(18))
    assert str(table.schema.field("loss_last_nats").type) == "double"
    assert set(table.column("state").to_pylist()) == {"done"}
    corpus = load_corpus(trained[0] / "done" / "source")
    assert sum(table.column("size").to_pylist()) == 2 * corpus.count(0)
    first, last = (np.array(table.column(f"loss_{end}_nats").to_pylist()) for end in ("first", "last"))
    assert (last < first).mean() > 0.8


def test_later_verbs_work_from_the_stored_config(copy, trained):
    summary = trained[1].json()
    heldout = copy("evaluate", "run=done", "output=json").json()["heldout"]
    assert heldout["bits_per_byte"] == summary["heldout"]["bits_per_byte"]
    plain = copy("evaluate", "run=done", "ensemble.pool=mean_logits", "output=json").json()["heldout"]
    assert plain["bits_per_byte"] == pytest.approx(summary["heldout"]["mean_logits"])
    one = copy("evaluate", "run=done", "ensemble.k=1", "ensemble.pool=mean_logits", "output=json").json()["heldout"]
    assert one["bits_per_byte"] == pytest.approx(summary["heldout"]["best_area"])
    assert copy("evaluate", "run=done", "ensemble.k=3").code == 2
    aggregated = copy("aggregate", "run=done", "output=json").json()
    assert aggregated["unusable_experts"] == 0


def test_status_counts_and_selects(copy):
    status = copy("status", "run=done", "output=json").json()
    assert status["experts"] == {"done": 18, "running": 0, "pending": 0, "failed": 0, "cold": 0}
    assert [group["state"] for group in status["groups"]] == ["done"] * 6
    some = copy("status", "run=done", "experts=[3,17]", "output=json").json()["selected"]
    assert [row["expert"] for row in some] == [3, 17]
    assert copy("status", "run=done", "state=failed", "output=json").json()["selected"] == []
    for wrong, words in (("experts=[18]", "no such expert"), ("state=lost", "known: done"), ("experts=[a]", "list of")):
        result = copy("status", "run=done", wrong)
        assert result.code == 2
        assert words in result.last
    assert "18 done" in copy("status", "run=done").out


def test_predict_scores_a_file_and_continues_a_text(copy):
    path = copy.folder / "some text.txt"
    path.write_bytes(b"alpha beta gamma (x, y) return")
    scored = copy("predict", "run=done", "input=some text.txt", "output=json").json()
    assert scored["items"] == 30
    assert np.mean(scored["bits"]) == pytest.approx(scored["bits_per_byte"], abs=1e-3)
    assert "bits/byte over 30 bytes" in copy("predict", "run=done", "input=some text.txt").out
    prompt = "return ${x} = 'a'\n"
    first = copy("predict", "run=done", f"prompt={prompt}", "sample=20", "output=json").json()
    again = copy("predict", "run=done", f"prompt={prompt}", "sample=20", "output=json").json()
    other = copy("predict", "run=done", f"prompt={prompt}", "sample=20", "seed=9", "output=json").json()
    assert first == again
    assert first["prompt"] == prompt
    assert other["text"] != first["text"]
    for arguments, words in (
        ((), "input: not given"),
        (("input=none.txt",), "no such file"),
        (("prompt=x",), "sample: not given"),
        (("prompt=x", "sample=-1"), "sample=-1"),
        (("input=some text.txt", "prompt=x", "sample=1"), "give one of them"),
    ):
        result = copy("predict", "run=done", *arguments)
        assert result.code == 2
        assert words in result.last


def test_a_flipped_byte_is_found_named_and_mended(copy):
    run = copy.folder / "done"
    before = Bank(run).read_group(4, 4)
    shard = Bank(run).shard_path("w2", 4)
    content = bytearray(shard.read_bytes())
    content[1000] ^= 4
    shard.write_bytes(content)
    refused = copy("aggregate", "run=done")
    assert refused.code == 2
    assert "bank/w2/c/4/0/0: damaged (group 4, experts 13 to 16)" in refused.last
    assert "colonnade launch run=done resume=true" in refused.last
    assert copy("launch", "run=done", "resume=true").code == 0
    for role, values in Bank(run).read_group(4, 4).items():
        np.testing.assert_array_equal(values, before[role])
    assert copy("aggregate", "run=done").code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ensemble/manifest.json", "colonnade aggregate"),
        ("relay/relay.safetensors", "start a new run"),
        ("router/router.safetensors", "start a new run"),
        ("source/source.safetensors", "start a new run"),
        ("config.yaml", "start a new run"),
        ("groups/2.json", "resume=true"),
    ],
)
def test_damaged_files_are_named(copy, name, words):
    (copy.folder / "done" / name).write_bytes(b"\0junk")
    verb = "aggregate" if name.startswith("groups") else "evaluate"
    result = copy(verb, "run=done")
    assert result.code == 2, result.err
    assert name.split("/")[0] in result.last
    assert words in result.last


def test_resume_refuses_what_would_change_the_result(copy):
    refused = copy("train", "run=done", "resume=true", "train.steps=21")
    assert refused.code == 2
    assert "train.steps: cannot change" in refused.last
    refused = copy("launch", "run=done", "estimator=spsa")
    assert refused.code == 2
    assert "estimator: cannot change" in refused.last
    allowed = copy("train", "run=done", "resume=true", "engine.workers=1", "train.steps=20", "output=json")
    assert allowed.code == 0, allowed.err


def test_stage_by_stage_gives_what_train_gives(cli, trained, small):
    assert cli("partition", *small, "run=r").code == 0
    assert not (cli.folder / "r" / "plan.json").exists()
    for verb in ("plan", "launch", "aggregate"):
        result = cli(verb, "run=r")
        assert result.code == 0, result.err
    heldout = cli("evaluate", "run=r", "output=json").json()["heldout"]
    assert heldout["bits_per_byte"] == trained[1].json()["heldout"]["bits_per_byte"]
    refused = cli("plan", "run=r", "plan.group_size=3")
    assert refused.code == 2
    assert "start a new run" in refused.last


@pytest.mark.parametrize("estimator", ["spsa", "backprop"])
def test_other_estimators_and_controls_train(cli, estimator):
    result = cli.train(f"estimator={estimator}", "optimizer=adam", "controls=[frozen_body,backprop]", "output=json")
    assert result.code == 0, result.err
    summary = result.json()
    assert summary["estimator"]["name"] == estimator
    assert summary["heldout"]["frozen_body"] is not None
    assert summary["baselines"]["backprop"] is not None
    if estimator == "backprop":
        assert summary["heldout"]["bits_per_byte"] == pytest.approx(summary["baselines"]["backprop"])


def test_the_reference_backend_agrees(cli, trained):
    result = cli.train("backend=reference", "output=json")
    assert result.code == 0, result.err
    expected = trained[1].json()["heldout"]["bits_per_byte"]
    assert result.json()["heldout"]["bits_per_byte"] == pytest.approx(expected, abs=5e-3)


def test_mlflow_holds_the_run_its_groups_and_its_artifacts(cli):
    import mlflow
    from mlflow.tracking import MlflowClient

    result = cli.train("tracking=mlflow", "run=runs/tracked")
    assert result.code == 0, result.err
    assert "not logged" not in result.err
    client = MlflowClient(f"sqlite:///{cli.folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("colonnade")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    assert len(runs) == 7
    assert parents[0].data.metrics["heldout/bits_per_byte"] > 0
    assert parents[0].data.params["train/steps"] == "20"
    names = {artifact.path for artifact in client.list_artifacts(parents[0].info.run_id)}
    assert {"summary.json", "experts.parquet", "config.yaml"} <= names
    assert not (cli.folder / "mlruns").exists()
    assert mlflow.__version__


def test_a_tracker_that_fails_costs_a_line(cli):
    result = cli.train("tracking=mlflow", "tracking.uri=http://127.0.0.1:9", "output=json")
    assert result.code == 0, result.err
    assert "tracking: not logged" in result.err
