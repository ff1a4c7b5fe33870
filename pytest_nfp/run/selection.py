"""Which cases a run has: GPUs, backends, subjects and their grids, as the options and what is installed give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packaging.version import Version

from pytest_nfp import baselines, catalog, frameworks, recordings, registry
from pytest_nfp.cases import (
    Backend,
    Case,
    Grid,
    Module,
    expand,
    frameworks_of,
    parse_backend,
    variants,
)
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.catalog.tiny import tiny
from pytest_nfp.devices import detect
from pytest_nfp.granularity import artifacts, check_release, evaluator
from pytest_nfp.measure import trust
from pytest_nfp.principle.routing import Replay, Routing
from pytest_nfp.records import Question
from pytest_nfp.routing_traces import parse_routing
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.settings import Settings

CPU_MODELS = ("qwen3-8b", "llada-2.1-mini")
"""What suites/models runs on a CPU unless it is told: a dense model and one with experts."""


def gpus(settings: Settings) -> list[str]:
    """The catalog names that are asked for. Raises UnknownName."""
    names = [detect() if n == "auto" else n for n in settings.gpu]
    return list(dict.fromkeys(n if n == "cpu" else catalog.gpu(n).name for n in names))


def routings(settings: Settings) -> list[Routing]:
    """--nfp-routing. Raises UnknownName for one that is none, FileError for a trace that can't be used."""
    try:
        return [parse_routing(text) for text in settings.routing]
    except ValueError as error:
        raise UnknownName(f"--nfp-routing: {error}") from None


def check_names(inputs: Inputs) -> None:
    """Raise UnknownName or FileError for anything given that does not exist, before anything runs."""
    settings = inputs.settings
    evaluator.trust_archives(settings.trust_artifacts)
    gpus(settings)
    for name in settings.model:
        catalog.model(name)
    # Releases are called as the index writes them from here on: 0.24 is 0.24.0, the folder of whose baselines is named so.
    settings.backend = tuple(str(_released(inputs, parse_backend(text))) for text in settings.backend)
    routings(settings)


def _released(inputs: Inputs, backend: Backend) -> Backend:
    """The backend with its release as a baseline or the index writes it. Raises UnknownName for one that neither has."""
    if not backend.release:
        return backend
    for gpu in catalog.gpus():
        for stored in baselines.stored_backends(inputs.baseline_folder, gpu.name):
            if stored.framework == backend.framework and Version(stored.release) == Version(backend.release):
                return stored
    return Backend(backend.framework, check_release(backend.framework, backend.release, inputs.settings.artifacts))


def backends_for(inputs: Inputs, gpu: str, module: Module) -> list[Backend]:
    """What is tested: --nfp-backend, else the installed frameworks, else the releases that have baselines."""
    known = frameworks_of(module, gpu)
    if gpu == "cpu":
        return _cpu_backends(inputs, known)
    stored = [b for b in baselines.stored_backends(inputs.baseline_folder, gpu) if b.framework in known]

    def installed_or_stored(framework: str) -> list[Backend]:
        release = _installed(framework)
        return [Backend(framework, release)] if release else [b for b in stored if b.framework == framework]

    chosen: list[Backend] = []
    if inputs.settings.backend:
        for backend in map(parse_backend, inputs.settings.backend):
            if backend.framework in known and _is_asked(inputs, gpu, backend.framework, module):
                chosen += [backend] if backend.release else installed_or_stored(backend.framework)
        return chosen
    for framework in known:
        if not _is_asked(inputs, gpu, framework, module):
            continue
        if framework == "torch":
            # Its GEMMs on a GPU that is here; its experts and attention where they are asked for by name.
            device = inputs.measuring_device(gpu) if module == "dense" else None
            stored_too = [b for b in stored if b.framework == framework]
            chosen += [Backend(framework, device.torch_release)] if device else stored_too
        else:
            chosen += installed_or_stored(framework)
    return chosen


def _is_asked(inputs: Inputs, gpu: str, framework: str, module: Module) -> bool:
    """Kernels that publish no rule have nothing but a boundary, and no recording: a device must be here."""
    return not frameworks.is_unruled(framework, module) or inputs.measuring_device(gpu) is not None


def _cpu_backends(inputs: Inputs, known: Sequence[str]) -> list[Backend]:
    """Torch, and every other framework that is installed here and has a forward; or those of them that are asked for."""
    asked = {b.framework for b in map(parse_backend, inputs.settings.backend)}
    chosen = []
    for framework in sorted(known, key=lambda f: (f != "torch", f)):
        if asked and framework not in asked:
            continue
        if framework == "torch":
            device, _ = inputs.device("cpu")
            chosen.append(Backend("torch", device.torch_release if device else "0"))
            continue
        release = _installed(framework)
        if release is not None:
            chosen.append(Backend(framework, release))
    return chosen


def _installed(framework: str) -> str | None:
    """The installed release: of a framework that the project names, or of the package that registers another one."""
    if framework in frameworks.known():
        return artifacts.installed_release(framework)
    return registry.release(framework)


def subjects_for(inputs: Inputs, gpu: str, backend: Backend, module: Module) -> list[Model]:
    """--nfp-model, else the subjects with baselines of this release, else those of the gate."""
    if inputs.settings.model:
        return [catalog.model(n) for n in inputs.settings.model]
    if module == "model":
        named = [m for m in catalog.models() if m.gate and m.layers is not None]
        return [m for m in named if m.name in CPU_MODELS] if gpu == "cpu" else named
    if gpu == "cpu":
        return [m for m in catalog.models() if m.device == "cpu"]
    folder = inputs.baseline_folder
    nearest = [b for b in baselines.stored_backends(folder, gpu) if b.framework == backend.framework]
    chosen = backend if backend in nearest else (nearest[-1] if nearest else None)
    names = baselines.stored_subjects(folder, gpu, chosen) if chosen else []
    known = {m.name: m for m in catalog.models()}
    return [known[n] for n in names if n in known] or [m for m in catalog.models() if m.gate]


def _scaled(inputs: Inputs, gpu: str, model: Model) -> Model:
    """The model as --nfp-scale says; module shapes stay, and have no cases."""
    is_tiny = (inputs.settings.scale or ("tiny" if gpu == "cpu" else "full")) == "tiny"
    if not is_tiny or model.layers is None or model.attention is None:
        return model
    device = inputs.device(gpu)[0] if gpu == "cpu" else None
    return tiny(model, trust.COLD_TURNS * device.cache_bytes if device is not None else 0)


def _grid(settings: Settings, module: Module, model: Model, is_named: bool) -> Grid | None:
    """What the options put in place of a subject's grid; None where it has none of the k.

    Raises UnknownName for a k above the E of a model that was asked for by name.
    """
    asked = Grid(settings.batch, settings.context, settings.top_k)
    if model.moe is None or module not in ("moe", "model"):
        return asked
    fit = tuple(k for k in asked.top_k if k <= model.moe.experts)
    if fit == asked.top_k:
        return asked
    if is_named:
        raise UnknownName(f"--nfp-top-k={max(asked.top_k)}: {model.name} has {model.moe.experts} experts")
    return replace(asked, top_k=fit) if fit else None


def select(
    inputs: Inputs,
    question: Question,
    module: Module,
    models: Sequence[str] | None = None,
    routing: Sequence[str] | None = None,
) -> list[Case]:
    """The cases of a module to which a question applies. Raises UnknownName for options that leave nothing.

    Granularity needs a tile rule; a CPU's prediction is calibrated on the machine, so its boundary alone is asked.
    """
    settings = inputs.settings
    cases: list[Case] = []
    has_left_out = False
    for gpu in gpus(settings):
        if (gpu == "cpu" and question != "boundary") or (question == "granularity" and module == "dense"):
            continue
        for backend in backends_for(inputs, gpu, module):
            if gpu != "cpu" and question != "boundary" and frameworks.is_unruled(backend.framework, module):
                continue
            subjects = [catalog.model(n) for n in models] if models else subjects_for(inputs, gpu, backend, module)
            for named in subjects:
                subject = _scaled(inputs, gpu, named) if module == "model" else named
                grid = _grid(settings, module, subject, bool(models or settings.model))
                if grid is None:
                    has_left_out = True
                    continue
                cases += _cases_of(inputs, question, gpu, backend, module, subject, grid)
    if not cases and has_left_out:
        raise UnknownName(f"--nfp-top-k={min(settings.top_k)}: no model that is asked for has so many experts")
    if not cases and settings.require_device and (absent := _absent(inputs, question, module)):
        raise UnknownName(f"--nfp-require-device: {absent}")
    # By id and file: the hash of a case is that of its whole model.
    different = {(c.id, c.subject.source): c for c in cases}.values()
    keep = [c for c in different if routing is None or c.routing in routing]
    return _one_a_map(keep) if question == "granularity" else keep


def _cases_of(
    inputs: Inputs, question: Question, gpu: str, backend: Backend, module: Module, subject: Model, grid: Grid
) -> list[Case]:
    """The cases of one subject, with the other kernels of its framework where they are measured."""
    cases: list[Case] = []
    for case in expand(gpu, backend, module, subject, routings(inputs.settings), inputs.settings.dtype, grid):
        _check_trace(case)
        cases += _as_recorded(inputs, case)
        if question == "boundary" and inputs.measuring_device(gpu) is not None:
            cases += variants(case)
    return cases


def _one_a_map(cases: Sequence[Case]) -> list[Case]:
    """The first case of each map: its rule does not look at batch, context or routing."""
    first: dict[tuple[str, Backend, str, str], Case] = {}
    for case in cases:
        first.setdefault((case.gpu, case.backend, case.subject.name, case.map_key), case)
    return list(first.values())


def _check_trace(case: Case) -> None:
    """Raise UnknownName for a trace of another model than the case's."""
    if isinstance(case.routing, Replay) and case.subject.moe is not None and case.top_k is not None:
        try:
            case.routing.check(case.subject.moe.experts, case.top_k)
        except ValueError as error:
            raise UnknownName(f"--nfp-routing, for {case.subject.name}: {error}") from None


def _as_recorded(inputs: Inputs, case: Case) -> list[Case]:
    """A dense FFN as its single GEMMs where recordings will answer: they hold GEMMs, not FFNs."""
    if case.module != "dense" or case.gpu == "cpu" or not _recorded_answers(inputs, case):
        return [case]
    return [replace(case, gemm=shape) for shape in dict.fromkeys(case.gemms)]


def _recorded_answers(inputs: Inputs, case: Case) -> bool:
    measure = inputs.settings.measure
    if measure not in ("auto", "recorded"):
        return False
    if measure == "auto" and inputs.device(case.gpu)[0] is not None:
        return False
    return case.backend in recordings.recorded_releases(case.gpu, case.module)


def _absent(inputs: Inputs, question: Question, module: Module) -> str:
    """The engines of which nothing but a boundary is asked, and why the device for it is not here; empty where there are none."""
    asked = {parse_backend(text).framework for text in inputs.settings.backend}
    for gpu in gpus(inputs.settings) if question == "boundary" else ():
        engines = [
            f for f in frameworks_of(module, gpu) if frameworks.is_unruled(f, module) and (not asked or f in asked)
        ]
        if gpu != "cpu" and engines and inputs.measuring_device(gpu) is None:
            reason = inputs.device(gpu)[1] or f"--nfp-measure={inputs.settings.measure}"
            return f"{module} by {', '.join(engines)} on {gpu} is measured alone: {reason}"
    return ""


def why_nothing(
    inputs: Inputs,
    question: Question,
    module: Module,
    models: Sequence[str] | None = None,
    routing: Sequence[str] | None = None,
) -> str:
    """Why `select` found no case, for the reader of a skipped test."""
    latent = [m.name for m in map(catalog.model, models or inputs.settings.model) if m.is_latent]
    if module == "model" and latent:
        return f"{', '.join(latent)}: no whole model with MLA is run or composed here; its modules have suites"
    if absent := _absent(inputs, question, module):
        return absent
    words = ", ".join(f"{k}={v}" for k, v in {"models": models, "routing": routing}.items() if v)
    asked = f"module={module}, question={question}" + (f", {words}" if words else "")
    return f"no case for {asked} with the GPU, backend and model that were asked for"
