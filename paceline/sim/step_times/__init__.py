"""Sources of step times, one file each; all implement ``StepTimes.seconds``."""

from paceline.sim.step_times.base import FixedStepTimes, StepTimes

__all__ = ["FixedStepTimes", "StepTimes"]
