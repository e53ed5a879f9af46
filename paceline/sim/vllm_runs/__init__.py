"""Recorded runs of a real vLLM and their prediction: ``runs`` reads them, ``prediction`` simulates
them, ``host`` measures a step's time besides its operators."""

from paceline.sim.vllm_runs.host import HostTime, for_run, measure
from paceline.sim.vllm_runs.prediction import predict, replica_config, step_times
from paceline.sim.vllm_runs.runs import Measured, VllmRun, find_runs

__all__ = [
    "HostTime",
    "Measured",
    "VllmRun",
    "find_runs",
    "for_run",
    "measure",
    "predict",
    "replica_config",
    "step_times",
]
