"""What a case stands on: the device, the map, the figures, the prediction and the baseline, each read once a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest_nfp
from pytest_nfp import devices
from pytest_nfp.baselines import BaselineFile, load_nearest
from pytest_nfp.cases import Backend, Case
from pytest_nfp.devices import Device
from pytest_nfp.files import FileError
from pytest_nfp.granularity import Granularity, RuleUnknown, artifacts, evaluator, granularity_of
from pytest_nfp.predict import Figures, Predicted, calibrations, predict_case
from pytest_nfp.records import identity_changes
from pytest_nfp.settings import Settings

FindDevice = Callable[[str, str], tuple[Device | None, str]]
"""A GPU's name and a timer -> the device, or None with the reason."""


def device_here(gpu: str, timer: str) -> tuple[Device | None, str]:
    """The device of this machine."""
    return devices.find_device(gpu, timer)


@dataclass(frozen=True, slots=True)
class Stored:
    """The baseline that a case is held to."""

    file: BaselineFile
    name: str
    """As messages call it: "the baseline of vllm==0.24.0"."""
    is_exact: bool
    """Whether it is of exactly this release, not of the nearest older one."""


@dataclass
class Inputs:
    """What the cases of a run stand on. `say` gets a line of progress now and then."""

    settings: Settings
    root: Path
    """The project's folder."""
    say: Callable[[str], None] = lambda text: None
    find_device: FindDevice = device_here
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """GPU -> the machine that this run measures on, as a record holds it."""
    machines_before: dict[str, Any] = field(default_factory=dict)
    """The machines of the run that --nfp-resume goes on with."""
    _devices: dict[str, tuple[Device | None, str]] = field(default_factory=dict)
    _granularity: dict[Case, Granularity | RuleUnknown] = field(default_factory=dict)
    _figures: dict[tuple[str, str], Figures] = field(default_factory=dict)
    _predicted: dict[Case, tuple[Predicted, Granularity | None]] = field(default_factory=dict)
    _baselines: dict[tuple[str, Backend, str], tuple[BaselineFile, Backend] | None] = field(default_factory=dict)
    _has_warned: bool = False

    def device(self, gpu: str) -> tuple[Device | None, str]:
        """The device, or None with the reason. Raises FileError where the earlier run was made on another machine."""
        if gpu not in self._devices:
            self._devices[gpu] = self.find_device(gpu, self.settings.timer)
            device, _ = self._devices[gpu]
            if device is not None:
                self.machines[gpu] = {"title": device.title, "identity": device.identity, "recorded": device.notes}
                self._check_same_machine(gpu)
        return self._devices[gpu]

    def measuring_device(self, gpu: str) -> Device | None:
        """The device, if this run measures on it."""
        return self.device(gpu)[0] if self.settings.measure in ("auto", "device") else None

    def _check_same_machine(self, gpu: str) -> None:
        before = self.machines_before.get(gpu, {})
        # Through JSON and back, as the file has been.
        now = json.loads(json.dumps(self.machines[gpu]))
        if before.get("identity") and (changes := identity_changes(before, now)):
            listed = "; ".join(f"{name} {was} to {is_now}" for name, was, is_now in changes)
            raise FileError(f"--nfp-resume: that run was made on another machine ({listed}): start anew")

    @property
    def baseline_folder(self) -> Path:
        """--nfp-baselines, else baselines/ of the project, else those shipped with the package."""
        if self.settings.baselines is not None:
            return self.settings.baselines
        own = self.root / "baselines"
        return own if own.is_dir() else Path(pytest_nfp.__file__).parent / "shipped" / "baselines"

    def granularity(self, case: Case) -> Granularity:
        """The case's map. Raises RuleUnknown."""
        same = replace(case, batch=1, context=None, routing=None, gemm=None)
        if same not in self._granularity:
            try:
                self._granularity[same] = granularity_of(case, self.settings.artifacts)
            except RuleUnknown as reason:
                self._granularity[same] = reason
            if not self._has_warned and (missing := evaluator.missing_walls()):
                self._has_warned = True
                self.say(f"warning: {missing}")
        known = self._granularity[same]
        if isinstance(known, RuleUnknown):
            raise known
        return known

    def figures(self, case: Case, granularity: Granularity | None) -> Figures:
        """Calibration or datasheet of a GPU; of the CPU, the calibration of the case's kernel, made at the first use.

        Raises RuleUnknown where the CPU can't be calibrated.
        """
        if case.gpu != "cpu":
            return calibrations.figures_of(case, granularity)
        kernel_and_dtype = (case.kernel or "", case.dtype)
        if kernel_and_dtype not in self._figures:
            from pytest_nfp.calibration import own_cpu

            device, reason = self.device("cpu")
            if device is None:
                raise RuleUnknown(reason)
            folder = artifacts.cache_folder("calibrations")
            self._figures[kernel_and_dtype] = own_cpu.figures(
                device, *kernel_and_dtype, folder, self.settings.seed, self.say
            )
        return calibrations.for_routing(self._figures[kernel_and_dtype], case.routing)

    def predicted(self, case: Case) -> tuple[Predicted, Granularity | None]:
        """Both predictors, and the map that they used. Raises RuleUnknown where the tile rule is needed and unknown."""
        if case not in self._predicted:
            granularity = None if case.module == "dense" else self.granularity(case)
            figures = self.figures(case, granularity)
            self._predicted[case] = predict_case(case, figures, granularity, self.settings.tolerance), granularity
        return self._predicted[case]

    def baseline(self, case: Case) -> Stored | None:
        """The stored file that a case is held to; None where there is none."""
        for gpu in self.baseline_gpus(case):
            key = (gpu, case.backend, case.subject.name)
            if key not in self._baselines:
                self._baselines[key] = load_nearest(self.baseline_folder, *key)
            if known := self._baselines[key]:
                file, backend = known
                return Stored(file, f"the baseline of {backend}", backend == case.backend)
        return None

    def baseline_gpus(self, case: Case) -> list[str]:
        """Folders of baselines, the first one first: a CPU has one of its own beside the shared one."""
        if case.gpu != "cpu":
            return [case.gpu]
        device, _ = self.device("cpu")
        if device is None:
            return ["cpu"]
        from pytest_nfp.calibration.own_cpu import identity_slug

        return [f"cpu-{identity_slug(device.identity)}", "cpu"]
