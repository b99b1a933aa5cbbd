import pytest

from hybridrl.runtime import oom as out_of_memory


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Sets what the kernel has counted by now; when the run began it had counted two."""
    monkeypatch.setattr(out_of_memory, "COUNTS", tmp_path / "vmstat")
    monkeypatch.setattr(out_of_memory, "_BEFORE", 2)
    return (tmp_path / "vmstat").write_text


def test_what_the_kernel_killed_since_the_run_began_is_laid_to_it(counted):
    counted("pgfault 9\noom_kill 5\n")
    assert "by the kernel for lack of memory: it has killed 3" in out_of_memory.killer()


def test_what_the_kernel_did_not_kill_is_not_laid_to_it(counted):
    counted("oom_kill 2\n")
    assert out_of_memory.killer().startswith("by hand or by a scheduler")


@pytest.mark.parametrize("told", ["", "pgfault 9\n"])
def test_where_the_kernel_does_not_count_both_are_named(counted, told):
    counted(told)
    assert "by hand, or by the kernel for lack of memory" in out_of_memory.killer()
    out_of_memory.COUNTS.unlink()
    assert "by hand, or by the kernel for lack of memory" in out_of_memory.killer()
