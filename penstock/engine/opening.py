"""An engine that is ready to serve: its model is loaded, proved and measured."""

from penstock.config.settings import EngineSettings
from penstock.engine.check import check_engine
from penstock.engine.engine import Engine
from penstock.engine.model import Progress, load_model


def open_engine(settings: EngineSettings, progress: Progress | None = None) -> Engine:
    """Load the model, prove that the engine gives its tokens, and return the engine.

    Raises `ModelLoadError`; its `EngineCheckFailed` means that tokens differ from `generate()`'s.
    """
    model = load_model(settings, progress)
    check_engine(model, settings, progress)
    engine = Engine(model, settings)
    engine.measure_speed()
    return engine
