"""The reference runner: a real VL model driven by the batch state.

Owns: the schedule and the prefill gate, the KV block pool, the engines, prompts, who drafts, the
comparison with each request alone, and faults on purpose. Never: owns a field or a feature that a
state object could own.
"""

from vlbatch.runner.drafting import Drafter, make_drafter
from vlbatch.runner.engines import ENGINES, make_answerer, make_engine
from vlbatch.runner.faults import FAULTS, Faults, make_faults
from vlbatch.runner.graph_engine import GraphEngine
from vlbatch.runner.inputs import Engine, MediaPatches, StepInputs
from vlbatch.runner.prompt import Prompt, PromptBuilder
from vlbatch.runner.requests import Request, load_requests
from vlbatch.runner.results import Result
from vlbatch.runner.runner import Runner
from vlbatch.runner.settings import GRAPH_MODES, RunSettings
from vlbatch.runner.verify import LOGIT_TOLERANCE, Mismatch, compare

__all__ = [
    "ENGINES",
    "FAULTS",
    "GRAPH_MODES",
    "LOGIT_TOLERANCE",
    "Drafter",
    "Engine",
    "Faults",
    "GraphEngine",
    "MediaPatches",
    "Mismatch",
    "Prompt",
    "PromptBuilder",
    "Request",
    "Result",
    "RunSettings",
    "Runner",
    "StepInputs",
    "compare",
    "load_requests",
    "make_answerer",
    "make_drafter",
    "make_engine",
    "make_faults",
]
