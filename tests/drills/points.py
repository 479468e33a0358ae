"""Where to kill: every crash point of every process, some of them at several counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """The `nth` time that a process of this kind reaches the label."""

    process: str  # as in OUTPACE_CRASH
    label: str
    nth: int = 1
    is_first: bool = True  # of the drills at this label

    @property
    def name(self) -> str:
        return f"{self.process}@{self.label}" + (f"#{self.nth}" if self.nth > 1 else "")


CONTROLLER = {
    "controller.started": (1,),
    "controller.admit": (1, 9),
    "controller.group_closed": (1, 14),
    "controller.chunk": (1, 6),
    "controller.close_batch": (1, 3),
    "controller.batch_trained": (1, 4),
    "controller.line_written": (1, 4),
    "controller.step_recorded": (1, 3),
    "controller.published": (2,),
    "controller.loaded": (2,),
    "controller.evaluate": (1, 2),
    "controller.evaluated": (1, 2),
    "controller.checkpoint_ordered": (1, 2),
    "controller.learner_saved": (1, 2),
    "controller.committed": (1, 2),
    "controller.finishing": (1,),
}
COMMIT = {
    "commit.begin": (1, 2),
    "commit.before_manifest": (1, 2),
    "commit.before_rename": (1, 3),
    "commit.after_rename": (1, 2),
    "prune.before": (1, 3),
    "prune.middle": (1,),
}
LEARNER = {
    "child.started": (1,),
    "learner.built": (1,),
    "child.ready": (1,),
    "chunk.before": (1, 5),
    "chunk.after": (1, 6),
    "step.before": (1, 3),
    "step.after": (1, 4),
    "publish.copied": (1, 3),
    "publish.sealed": (1, 3),
    "save.copied": (1, 2),
    "save.model": (1, 2),
    "save.optimizer": (1,),
    "save.done": (1, 2),
}
ENGINE = {
    "child.started": (1,),
    "child.ready": (1,),
    "engine.built": (1,),
    "engine.request": (1, 30),
    "engine.turn": (5, 60),
    "engine.load_read": (1, 3),
    "engine.swapped": (1, 3),
    "engine.pinned": (1, 2),
    "engine.release_pinned": (1,),
}
WORKER = {
    "child.started": (1,),
    "child.ready": (1,),
    "worker.run": (1, 10),
    "worker.episodes_done": (1, 12),
    "worker.graded": (1, 7),
    "worker.closed": (2, 11),
    "journal.before": (1, 5),
    "journal.torn": (1, 6),
    "journal.after": (1, 7),
    "worker.evaluate": (1, 5),
}
GRADER = {
    "user_code.started": (1,),
    "user_code.called": (1, 8),
    "user_code.answered": (1, 8),
}

ENVIRONMENT = {
    "user_code.started": (1,),
    "user_code.called": (1, 9),
    "user_code.answered": (1, 9),
}

TABLE = {"controller": CONTROLLER | COMMIT, "learner": LEARNER, "engine": ENGINE, "worker": WORKER, "grader": GRADER}

POINTS = [
    Point(process, label, nth, is_first=nth == times[0])
    for process, labels in TABLE.items()
    for label, times in labels.items()
    for nth in times
]
"""Each point is at least one drill."""

AGENT_POINTS = [
    *(Point("environment", label, nth) for label, times in ENVIRONMENT.items() for nth in times),
    Point("worker", "turns.torn"),
    Point("worker", "turns.torn", 20),
]
"""Points that only runs with environments and several turns reach."""

AFTER_A_STEP = Point("controller", "controller.step_recorded", 3)
IN_A_STEP = Point("controller", "controller.close_batch", 5)
AFTER_A_CHECKPOINT = Point("controller", "controller.committed")
WHILE_RESUMING = [
    ("lag2", AFTER_A_STEP, Point("controller", "controller.started")),
    ("lag2", AFTER_A_STEP, Point("controller", "controller.admit")),
    ("lag2", AFTER_A_STEP, Point("learner", "learner.built")),
    ("lag2", IN_A_STEP, Point("learner", "load.middle")),
    ("free", AFTER_A_CHECKPOINT, Point("controller", "journal.copied")),
    ("free", AFTER_A_CHECKPOINT, Point("controller", "journal.renamed")),
    ("lag2", IN_A_STEP, Point("controller", "journal.removed")),
    ("lag2", IN_A_STEP, Point("engine", "engine.built")),
    ("lag2", IN_A_STEP, Point("worker", "worker.run")),
    ("free", AFTER_A_CHECKPOINT, Point("worker", "worker.release")),
    ("agent", AFTER_A_CHECKPOINT, Point("controller", "turns.copied")),
    ("agent", AFTER_A_CHECKPOINT, Point("controller", "turns.renamed")),
    ("agent", AFTER_A_CHECKPOINT, Point("controller", "turns.removed")),
]
"""Mode of the run, a first death, and a second death in the start that resumes."""

TESTED_ELSEWHERE = {
    "commit.set_aside": "a checkpoint of the same step already exists: tests/checkpoint",
}
"""Crash points that no drill reaches, and the tests that cover them."""
