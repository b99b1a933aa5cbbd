import pytest

from hybridrl.config.findings import ConfigError

from .conftest import Load


def test_weights_are_one_for_each_entry(load: Load) -> None:
    files = "data.train_files=[train.jsonl,train.jsonl]"
    assert load(files, "data.train_weights=[2,1]").config.data.train_weights == [2.0, 1.0]
    with pytest.raises(ConfigError, match=r"data.train_weights=\[2.0, 1.0, 1.0\]: data.train_files has 2 entries"):
        load(files, "data.train_weights=[2,1,1]")
    with pytest.raises(ConfigError, match="must be more than 0"):
        load(files, "data.train_weights=[2,0]")


@pytest.mark.parametrize(
    ("path", "name"),
    [("data.custom_cls.path", "data.custom_cls.name"), ("data.sampler.class_path", "data.sampler.class_name")],
)
def test_a_class_custom_class_needs_both_keys(load: Load, tmp_path, path: str, name: str) -> None:
    (tmp_path / "own.py").touch()
    with pytest.raises(ConfigError, match=f"{path}=own.py: the class in it is not named; set {name}"):
        load(f"{path}=own.py")
    assert f"{name}=Own has no effect without {path}" in load(f"{name}=Own").notes
    with pytest.raises(ConfigError, match="decides by itself which rows are sampled; leave the weights out"):
        load(f"{path}=own.py", f"{name}=Own", "data.train_weights=[1]")
