"""A recorded engine is played back step by step; the model's error is told apart from it."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import msgspec
import pytest

from kvrelay.cli.main import run
from kvrelay.config import DisaggConfig, EngineConfig, MockConfig, WorkerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.handoff import HandoffId
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.recording import Call, RecordedCore, Step
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import StepOutput
from kvrelay.errors import ConfigError, InvalidInputError
from kvrelay.executors.mock import MockExecutor
from kvrelay.launch import worker_process
from kvrelay.placement.base import PrefillLoad
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.simulate.loads import trace_arrivals
from kvrelay.simulate.playback import play_back, read_recording
from kvrelay.simulate.verify import text_of, verify

CONFIG = EngineConfig(block_size=4, num_blocks=96, max_num_seqs=4, max_num_batched_tokens=32)
TIMES = MockConfig(decode_base_s=0.0005, decode_seq_s=0.0001, prefill_base_s=0.001, prefill_token_s=0.00001)


def recorded(path: Path, mock: MockConfig = TIMES) -> RecordedCore:
    executor = MockExecutor(CONFIG, mock, vocab_size=512)
    return RecordedCore(executor, CONFIG, path, worker_id="w", model="m", seed=3)


def a_request(name: str, rng: random.Random, **fields: object) -> Request:
    prompt = [7] * 8 + [rng.randrange(512) for _ in range(rng.randrange(2, 60))]
    sampling = SamplingParams(max_tokens=rng.randrange(1, 30))
    return Request(name, prompt, sampling, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worker's mock engine on its thread (``--record-steps``), with cancelled requests, a prefix that is shared, and
    more work than fits."""
    path = tmp_path_factory.mktemp("recordings") / "steps.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "build_executor", lambda *_: MockExecutor(CONFIG, TIMES, vocab_size=512))
        settings = WorkerConfig(model_path=Path("none"), engine_kind="mock", engine=CONFIG, record_steps=str(path))
        thread = worker_process.load_engine(settings, "w")
    rng = random.Random(1)
    left, is_over = set(map(str, range(40))) - {"5", "11"}, threading.Event()

    def on_step(step: StepOutput) -> None:
        left.difference_update(output.request_id for output in step.outputs if output.finish_reason)
        if not left:
            is_over.set()

    thread.start(on_step, lambda error: is_over.set())
    for number in range(40):
        request = a_request(str(number), rng)
        thread.post(lambda core, request=request: core.add_request(request))
        if number in (5, 11):
            thread.post(lambda core, number=number: core.abort(str(number)))
    thread.post(lambda core: core.clear_cache())
    assert is_over.wait(30.0)
    assert not left
    assert thread.close(10.0)
    return path


def test_a_recording_is_a_load(recording: Path) -> None:
    """Times, prompts and answers are the recorded ones; cancelled answers are as long as they had become."""
    calls = [record for record in read_recording(recording) if isinstance(record, Call) and record.request is not None]
    found = trace_arrivals(recording, time_scale=2.0)
    assert len(found) == len(calls) == 40
    for number, (arrival, call) in enumerate(zip(found, calls)):
        assert call.request is not None
        assert arrival.time_s == (call.at_s - calls[0].at_s) / 2.0
        assert arrival.prompt(number, 512) == call.request.prompt_token_ids
        if number not in (5, 11):
            assert arrival.answer_tokens == call.request.sampling.max_tokens
    assert trace_arrivals(recording, limit=3, time_scale=2.0) == found[:3]
    assert run(["simulate", "--trace", str(recording), "--both", "1", "--prefill", "0", "--decode", "0"]) == 0


def test_prompts_beyond_the_context_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "log.csv"
    trace.write_text("time,prompt_tokens,output_tokens\n1,400,5\n2,30,5\n3,300,9\n")
    assert run(["simulate", "--trace", str(trace), "--max-model-len", "300"]) == 0
    said = "prompts that fail, longer than the context of 300 tokens: 2; if the model takes them: --max-model-len 405"
    assert said in capsys.readouterr().out
    assert run(["simulate", "--trace", str(trace), "--max-model-len", "405", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_too_long"], report["num_done"]) == (0, 3)


def test_the_recorded_schedule_is_played_back_batch_by_batch(recording: Path) -> None:
    playback = play_back(recording)
    assert playback.difference == ""
    steps = [record for record in read_recording(recording) if isinstance(record, Step)]
    assert playback.num_steps == len(steps) > 40
    assert sum(request.is_done for request in playback.requests.values()) == 38
    sizes = {len(step.batch) for step in steps}
    # Which others there are depends on when the thread took the requests.
    assert len(sizes) > 1
    assert max(sizes) == CONFIG.max_num_seqs


def test_another_scheduler_is_found_out(recording: Path, tmp_path: Path) -> None:
    """One request that is shorter by a token: the playback says which step is the first to differ."""
    lines = recording.read_bytes().splitlines(keepends=True)
    for at, line in enumerate(lines):
        if b'"add_request"' in line:
            call = msgspec.json.decode(line, type=Call)
            assert call.request is not None
            shorter = msgspec.structs.replace(call.request, prompt_token_ids=call.request.prompt_token_ids[:-1])
            lines[at] = msgspec.json.encode(msgspec.structs.replace(call, request=shorter)) + b"\n"
            break
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"".join(lines))
    found = verify(changed)
    assert "played back" in found["scheduler"]["difference"]
    assert found["model"] is None
    assert "DIFFERENT: step" in text_of(found)


def test_the_models_error_is_reported_for_each_latency(recording: Path) -> None:
    found = verify(recording)
    assert found["scheduler"]["difference"] == ""
    latencies = found["model"]["latencies"]
    assert set(latencies) == {"ttft_s", "itl_s", "e2e_s"}
    assert all(set(figures) == {"mean", "p50", "p90", "p99"} for figures in latencies.values())
    # The mock's steps follow the formula of the fit, but its sleeps stretch on a busy machine.
    assert abs(latencies["e2e_s"]["mean"]["error"]) < 0.5
    assert found["model"]["costs"]["step"]["step_s"] > 0.0
    assert "identical" in text_of(found)


@pytest.mark.parametrize("tail_tokens", [0, 3])
def test_placement_by_cost_and_hand_offs_are_played_back(tmp_path: Path, tail_tokens: int) -> None:
    """The placement's answers and the peers' calls are inputs of the engine: both are in the file."""
    path = tmp_path / "handoffs.jsonl"
    core, rng = recorded(path, MockConfig(speedup_ratio=0, tail_tokens=tail_tokens)), random.Random(2)
    placement = CostPlacement(DisaggPolicy(DisaggConfig()), lambda: PrefillLoad(1, 0), lambda _: None, MonotonicClock())
    for number in range(30):
        state = PlacementState(placement, placement.objectives())
        core.add_request(a_request(f"cost-{number}", rng, placement=state))
    core.add_request(a_request("remote", rng, mode=PrefillMode.REMOTE))
    half = a_request("half", rng, mode=PrefillMode.HANDOFF)
    if tail_tokens:
        half.sampling = SamplingParams(max_tokens=0)
    core.add_request(half)
    while core.has_unfinished():
        outputs: list[StepOutput] = []
        outputs.append(core.step(outputs.append))
        for output in outputs:
            for prefill in output.remote_prefills:
                core.resume_handoff(prefill.handoff_id, 1, None if tail_tokens else 9, None)
                core.end_loan(prefill.handoff_id, 1)
            if any(chunk.last for chunk in output.handoff_chunks):
                core.sending_finished("half")
    core.executor.shutdown()
    playback = play_back(path)
    assert playback.difference == ""
    assert playback.has_handoffs
    calls = [record for record in read_recording(path) if isinstance(record, Call)]
    assert any(call.handoff_id == HandoffId("w", 1) for call in calls)
    assert "hand-offs" in verify(path)["model_reason"]


def test_a_recording_that_is_cut_off_counts_up_to_there(recording: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(recording.read_bytes()[:-20])
    assert play_back(cut).num_steps == play_back(recording).num_steps - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b'{"type":"step","begin_s":0.0,"end_s":0.0}\n', "the header"), (b"nonsense\n", "line 1")],
)
def test_a_file_that_is_no_recording_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message) as caught:
        verify(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("line", "field", "value", "message"),
    [
        (0, "num_blocks", 10**26, "num_blocks"),
        (0, "num_blocks", 10**12, "num_blocks"),
        (0, "block_size", 0, "block_size"),
        (1, "at_s", 1e26, "line 3: its time is a month"),
        (2, "at_s", -1e308, "line 3: its time is a month"),
    ],
)
def test_numbers_that_no_engine_has_are_refused(
    recording: Path, tmp_path: Path, line: int, field: str, value: float, message: str
) -> None:
    lines = recording.read_bytes().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | {field: value}).encode()
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InvalidInputError, match=message):
        verify(path)


def test_a_device_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="recording /dev/zero is empty"):
        verify(Path("/dev/zero"))


def test_a_file_that_cannot_be_written_ends_the_start_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-steps .*: No such file or directory"):
        recorded(tmp_path / "missing" / "steps.jsonl")


def test_the_command_prints_both_errors_and_fails_on_a_difference(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "--verify", str(recording)]) == 0
    printed = capsys.readouterr().out
    assert "steps, identical" in printed
    assert "TTFT" in printed
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(recording.read_bytes().replace(b'"max_num_seqs":4', b'"max_num_seqs":3'))
    assert run(["simulate", "--verify", str(changed)]) == 1
    captured = capsys.readouterr()
    assert "DIFFERENT" in captured.out
    assert captured.err.count("\n") == 1


def test_the_command_needs_a_load_or_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate"]) == 2
    assert "--trace FILE" in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_and_not_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    core, rng = recorded(Path("/dev/full")), random.Random(4)
    for number in range(40):  # more than the file buffers
        core.add_request(a_request(str(number), rng))
        while core.scheduler.has_work:
            core.step()
    core.executor.shutdown()
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["--record-steps /dev/full is cut short: No space left on device"]
