"""What a worker or a gateway imports, and what loading a model keeps in its process: to be imported before a fork.

A worker that is forked from here starts in half the processor time. Nothing else of it is the child's: no thread,
connection, file or model exists here.
"""

import importlib

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.loading.loading import load_model
from penstock.garbage import freeze_loaded_objects

_MODULES = (
    "confluent_kafka", "penstock.bus.kafka.member", "penstock.bus.streams.member", "penstock.cli.gateway",
    "penstock.cli.main", "penstock.cli.worker", "penstock.decode_worker.main", "penstock.decode_worker.role",
    "penstock.endpoint_worker.main", "penstock.endpoint_worker.role", "penstock.engine.loading.proof",
    "penstock.engine.opening", "penstock.ingest.main", "penstock.prefill_worker.main",
    "penstock.prefill_worker.role", "penstock.telemetry.spans", "penstock.worker.process", "penstock.worker.worker",
)  # fmt: skip
for _module in _MODULES:
    importlib.import_module(_module)

torch.set_num_threads(1)  # a pool of threads would not survive the fork
load_model(EngineSettings(model="demo", threads=1))
freeze_loaded_objects()  # a collection in a forked process does not write to what it shares with the others
