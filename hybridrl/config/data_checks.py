"""Which settings of the data cannot work together; what the files hold is seen when they are read."""

from collections.abc import Callable

from hybridrl.config.error import Refusals
from hybridrl.config.schema import DataConfig

Note = Callable[[str], None]


def check_data(data: DataConfig, note: Note, wrong: Refusals) -> None:
    own, sampler = data.custom_cls, data.sampler
    for key, path, name, name_key in (
        ("data.custom_cls.path", own.path, own.name, "data.custom_cls.name"),
        ("data.sampler.class_path", sampler.class_path, sampler.class_name, "data.sampler.class_name"),
    ):
        if path and not name:
            wrong.add(f"{key}={path}: set {name_key} to the class in it")
        if name and not path:
            note(f"{name_key}={name} has no effect without {key}")
    weights, files = data.train_weights, data.train_files
    asked = f"data.train_weights=[{','.join(f'{weight:g}' for weight in weights)}]"
    if weights and len(weights) != len(files):
        wrong.add(f"{asked}: data.train_files has {len(files)} entries; give each its weight")
    for key, path in (("data.custom_cls", own.path), ("data.sampler", sampler.class_path)):
        if weights and path:
            wrong.add(f"{asked}: {key} decides by itself which rows are drawn; leave the weights out")
