"""All that a backend may import: hooks, data and protocols. No I/O, no device code, no torch at
import.
"""

from ml4core.api.backend import Backend, Device, DeviceKind, ModelPart, Probe, Session
from ml4core.api.capabilities import VOCABULARY, Capabilities
from ml4core.api.collectives import Collectives
from ml4core.api.deployment import CORE_SWITCHES, Deployment
from ml4core.api.faults import Fault, FaultError
from ml4core.api.hookspecs import BACKENDS_GROUP, COMMANDS_GROUP, PROJECT, hookimpl, hookspec
from ml4core.api.layouts import KVCache, KVField, KVLayout, KVPart
from ml4core.api.memory import DeviceMemory, MemoryFigures
from ml4core.api.model import (
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    SSMaxKind,
    SSMaxSpec,
    YarnSpec,
)
from ml4core.api.op_spec import Arg, OpSpec
from ml4core.api.ops import OPS
from ml4core.api.refusal import (
    Refusal,
    Refused,
    refuse_missing,
    undeclared,
    unknown_switches,
)
from ml4core.api.speculation import (
    DRAFT_GROUP,
    DRAFT_SALT,
    DRAFT_WEIGHTS,
    Drafter,
    DraftOutput,
    DraftPlan,
    DraftSpec,
    DraftStep,
    DraftWeights,
    Sampling,
    Verified,
    Verifier,
)
from ml4core.api.stages import (
    STAGES,
    Accepted,
    AttnInputs,
    Candidate,
    LayerKV,
    Rejected,
    Selection,
    StageSpec,
)
from ml4core.api.step import (
    Capture,
    CapturingExecutor,
    Segment,
    StepBuckets,
    StepExecutor,
    StepOutput,
    StepPlan,
    StepShape,
)
from ml4core.api.version import API_KEYWORD, API_VERSION, SUPPORTED_API_VERSIONS
from ml4core.api.vision import (
    VISION_LAYER_WEIGHTS,
    VISION_WEIGHTS,
    VisionShape,
    VisionSpec,
    VisionWeights,
)
from ml4core.api.weights import GLOBAL_WEIGHTS, LAYER_WEIGHTS, WEIGHT_FORMATS, Weight

__all__ = [
    "API_KEYWORD",
    "API_VERSION",
    "BACKENDS_GROUP",
    "COMMANDS_GROUP",
    "CORE_SWITCHES",
    "DRAFT_GROUP",
    "DRAFT_SALT",
    "DRAFT_WEIGHTS",
    "GLOBAL_WEIGHTS",
    "LAYER_WEIGHTS",
    "OPS",
    "PROJECT",
    "STAGES",
    "SUPPORTED_API_VERSIONS",
    "VISION_LAYER_WEIGHTS",
    "VISION_WEIGHTS",
    "VOCABULARY",
    "WEIGHT_FORMATS",
    "Accepted",
    "Arg",
    "AttnInputs",
    "Backend",
    "Candidate",
    "Capabilities",
    "Capture",
    "CapturingExecutor",
    "Collectives",
    "Deployment",
    "Device",
    "DeviceKind",
    "DeviceMemory",
    "DraftOutput",
    "DraftPlan",
    "DraftSpec",
    "DraftStep",
    "DraftWeights",
    "Drafter",
    "Fault",
    "FaultError",
    "IndexerSpec",
    "KVCache",
    "KVField",
    "KVLayout",
    "KVPart",
    "LayerKV",
    "LayerSpec",
    "MemoryFigures",
    "MoESpec",
    "ModelPart",
    "ModelSpec",
    "OpSpec",
    "Probe",
    "Refusal",
    "Refused",
    "Rejected",
    "RopeSpec",
    "SSMaxKind",
    "SSMaxSpec",
    "Sampling",
    "Segment",
    "Selection",
    "Session",
    "StageSpec",
    "StepBuckets",
    "StepExecutor",
    "StepOutput",
    "StepPlan",
    "StepShape",
    "Verified",
    "Verifier",
    "VisionShape",
    "VisionSpec",
    "VisionWeights",
    "Weight",
    "YarnSpec",
    "hookimpl",
    "hookspec",
    "refuse_missing",
    "undeclared",
    "unknown_switches",
]
