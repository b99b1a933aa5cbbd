"""One row of data -> a prompt, or everything that is wrong with the row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.files import LINES
from hybridrl.config.schema import DataConfig
from hybridrl.config.schema_parts import NO_SOURCE
from hybridrl.core.carried import Fields, brought
from hybridrl.core.pictures import Picture
from hybridrl.data import NO_TRUTH, TRUTHS, Message, no_prompt, no_truth
from hybridrl.data.formats import AREAL, to_verl_format, with_objects
from hybridrl.data.pictures import Encoded, PictureFault, listed, located, multimodal_fault, placed
from hybridrl.data.processor import BLIND
from hybridrl.data.rows import DataRow
from hybridrl.data.template_arguments import row_fault
from hybridrl.data.tokenizer import as_chat, as_messages, as_object, as_tools

NULL_TRUTH = "the ground truth is null: set reward.custom_reward_function.path, a built-in reward needs one"


@dataclass(frozen=True)
class Prompt:
    """`row` counts the rows of all files from 0; `messages` is the prompt of the row, which may be a plain text;
    `columns` are all columns of the row, for environments. `tools` are the schemas that the row gives to the model.

    `encoded` are its pictures by where the row has them, in the order of the parts {"type": "image"} of its messages;
    `pictures` hold the pixels of these while the prompt is in use. `fault`: why they could not be read again.
    """

    row: int
    ids: list[int]
    messages: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict, compare=False)
    tools: list[dict[str, Any]] = field(default_factory=list, compare=False)
    carried: Fields = field(default_factory=dict, compare=False)  # from its columns carried.NAME, and its pictures
    encoded: Mapping[str, Encoded] = field(default_factory=dict, compare=False, repr=False)
    pictures: tuple[Picture, ...] = field(default=(), compare=False)
    fault: str = field(default="", compare=False)


def parse_row(
    row: DataRow, config: DataConfig, *, needs_truth: bool = False, sees: bool = False, blind: str = BLIND
) -> Prompt | list[str]:
    """Return the row as a prompt without ids, or all faults of the row. The model `sees` pictures, or is `blind` for
    this reason."""
    columns = with_objects(row.values)
    form, values = to_verl_format(columns, config.reward_fn_key)
    prompt = values.get(config.prompt_key if form != AREAL else "prompt")
    messages = as_messages(prompt) or (prompt if isinstance(prompt, str) else None)
    tools = as_tools(values.get(config.tools_key))
    faults = []
    if tools is None:
        faults.append(f"data.tools_key={config.tools_key} must hold a list of schemas of tools ([{{...}}, ...])")
    if not messages:
        faults.append(no_prompt(columns, config.prompt_key))
    has_truth, ground_truth = True, None
    if (key := config.ground_truth_key) and key != NO_TRUTH:
        has_truth, ground_truth = key in columns, columns.get(key)
        ground_truth = (as_object(ground_truth) or {}).get("ground_truth", ground_truth)  # from an object that has it
        # Put it into the columns in which environments look for it.
        columns |= {name: (as_object(columns.get(name)) or {}) | {"ground_truth": ground_truth} for name in TRUTHS}
    elif not key:
        reward = as_object(values.get("reward_model")) or {}
        has_truth, ground_truth = "ground_truth" in reward, reward.get("ground_truth")
    if not has_truth:
        faults.append(no_truth(row.values, values.get("reward_model"), key))
    elif ground_truth is None and needs_truth:
        faults.append(NULL_TRUTH + " (a text file has none)" * row.place.partition(", ")[0].endswith(LINES))
    unread = multimodal_fault(row.values, messages, config.image_key, sees=sees, why=blind)
    faults += [fault for fault in (unread, row_fault(row.values)) if fault]
    pictures: dict[str, Encoded] = {}
    if sees and messages:
        messages, pictures, unread = _with_pictures(row, messages, config.image_key)
        faults += unread
    extra_info = values.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        fix = "write it with json.dumps, or under another name"
        faults.append(f"extra_info is not an object ({{...}}) or JSON text of one, but {extra_info!r:.60}: {fix}")
    source = values.get(config.reward_fn_key)
    if isinstance(source, list | dict):
        faults.append(f"data.reward_fn_key={config.reward_fn_key} must hold a text, the row has {source!r:.60}")
    try:
        carried = brought(columns)
    except ValueError as error:
        return [*faults, str(error)]
    if faults or not messages:
        return faults
    data_source = NO_SOURCE if source is None else str(source) or NO_SOURCE
    values = messages, data_source, ground_truth, extra_info, columns, tools or [], carried, pictures
    return Prompt(row.number, [], *values)


def _with_pictures(
    row: DataRow, messages: list[Message] | str, key: str
) -> tuple[list[Message] | str, dict[str, Encoded], list[str]]:
    """Return the messages with a part in the place of each picture, the pictures, and the faults of these."""
    faults, pictures, folder = [], {}, Path(row.place.rpartition(", ")[0]).parent
    try:
        chat, forms = placed(as_chat(messages), listed(row.values.get(key)), key)
    except ValueError as error:
        return messages, {}, [str(error)]
    for place, form in forms.items():
        try:
            pictures[place] = located(form, folder)
        except PictureFault as fault:
            faults.append(f"{place}: {fault}")
    return chat if forms else messages, pictures, faults
