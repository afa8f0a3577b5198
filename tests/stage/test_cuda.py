"""Saves and restores of states on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast.errors import SaveWarning
from stage.training import make_checkpointer

pytestmark = pytest.mark.gpu

CYCLES = 300_000_000  # of the device's clock: a tenth of a second or more
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool)


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).cuda()
    optimizer = AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    step(state)
    return state


def step(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(32, 512, device="cuda")).square().mean().backward()
    state["optimizer"].step()


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    slots = [slot for one in state["optimizer"].state.values() for slot in one.values()]
    return [tensor.detach().cpu().clone() for tensor in (*state["model"].state_dict().values(), *slots)]


def restored(home: Path, state: dict[str, Any]) -> list[torch.Tensor]:
    with make_checkpointer(home, state) as ckpt:
        assert ckpt.restore() is not None
    return tensors_of(state)


def test_a_save_has_its_own_moment_although_work_is_queued_before_and_after_it(tmp_path: Path) -> None:
    state = make_state()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.prepare()
        expected = tensors_of(state)
        torch.cuda._sleep(CYCLES)
        pending = ckpt.save(1)
        for _ in range(3):  # buffers change in the forward pass, the rest in the step
            step(state)
        pending.wait_durable()
    found = restored(tmp_path / "home", make_state())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_save_returns_before_the_device_has_done_what_is_queued(tmp_path: Path) -> None:
    state = make_state()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1).wait_durable()
        done = torch.cuda.Event()
        torch.cuda._sleep(CYCLES)
        done.record()
        pending = ckpt.save(2)
        was_done = done.query()
        pending.wait_durable()
    assert not was_done


def test_a_write_outside_of_a_step_during_the_copy_is_detected(tmp_path: Path) -> None:
    state = make_state()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1).wait_durable()
        torch.cuda._sleep(CYCLES)
        ckpt.save(2)
        with torch.no_grad():
            state["model"][0].weight.add_(1.0)
        with pytest.warns(SaveWarning, match="changed"):
            ckpt.wait()
    assert holdfast.open(tmp_path / "home").verify().is_good


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_all_kinds_are_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = torch.arange(24.0, device="cuda").reshape(2, 3, 4).to(dtype)
    state = {"plain": plain, "transposed": plain.transpose(0, 2), "offset": plain.flatten()[5:17]}
    if dtype.is_complex:
        state |= {"conjugate": plain.conj(), "negative": plain.conj().imag}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1).wait_durable()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    targets = {name: torch.zeros_like(tensor.resolve_conj().resolve_neg()) for name, tensor in state.items()}
    with make_checkpointer(tmp_path / "home", targets) as ckpt:
        ckpt.restore()
    for name, tensor in targets.items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu().flatten().view(torch.uint8), bytes_of(expected[name])), name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)


def test_the_next_random_numbers_of_the_device_are_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {"x": torch.zeros(4, device="cuda")}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1).wait_durable()
    expected = torch.randn(8, device="cuda")
    torch.manual_seed(2)
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.restore()
        assert torch.equal(torch.randn(8, device="cuda"), expected)


def test_a_run_under_another_default_device_saves_and_restores(tmp_path: Path) -> None:
    with torch.device("cuda"):
        state = make_state()
        with make_checkpointer(tmp_path / "home", state) as ckpt:
            ckpt.record(1, loss=torch.ones((), device="cuda"))
            ckpt.save(1).wait_durable()
        expected = tensors_of(state)
        found = restored(tmp_path / "home", make_state())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_step_in_a_graph_does_not_tear_a_save(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 22, device="cuda", requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight], lr=0.1, capturable=True)
    with make_checkpointer(tmp_path / "home", {"weight": weight, "optimizer": optimizer}) as ckpt:
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
        expected = weight.detach().cpu().clone()
        torch.cuda._sleep(CYCLES)
        pending = ckpt.save(1)
        graph.replay()
        pending.wait_durable()
    found = holdfast.open(tmp_path / "home")["weight"]
    assert torch.equal(found, expected)


def test_training_continues_after_cuda_has_refused_to_page_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = torch.cuda.cudart()

    class Refusing:
        """CUDA's runtime, asked to page-lock memory that does not exist."""

        def cudaHostRegister(self, _: int, num_bytes: int, flags: int) -> Any:
            return runtime.cudaHostRegister(8, num_bytes, flags)

    monkeypatch.setattr("holdfast.checkpoint.stage.arena._cudart", Refusing)
    state = make_state()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        expected = tensors_of(state)
        pending = ckpt.save(1)
        step(state)
        torch.cuda.synchronize()
        pending.wait_durable()
    assert "CUDA refused to page-lock" in capsys.readouterr().err
    found = restored(tmp_path / "home", make_state())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
