"""Files of `hybridrl launch`: bash and the schemas of KubeRay and SkyPilot accept them, and their command is the user's
byte for byte."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import bashlex
import jsonschema
import pytest
import yaml

from hybridrl.config.compose import as_override
from tests.launch.conftest import Rendered
from tests.launch.hosts import PLACE, POOLS, RUN

ENGINES = ("slurm", "ssh", "kuberay", "skypilot")
NEEDED = {
    "slurm": ["--nodes", "3", "--gpus", "8"],
    "ssh": ["--hosts", "hosts", "--gpus", "8"],
    "kuberay": ["--nodes", "3", "--gpus", "8", "--container", "image", "--mounts", "claim:/shared"],
    "skypilot": ["--nodes", "3", "--gpus", "H100:8", "--mounts", "s3://bucket:/shared"],
}
# Options and keys of a run, by what is special about it.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    "spaces": ([], ["+mine.text=" + as_override("two  words ")]),
    "quotes": ([], ["+mine.text=" + as_override('it\'s "quoted" `as` \\ $HOME $(id) $$ !x')]),
    "references": ([], ["+mine.text=${trainer.project_name}"]),
    "newlines": ([], ["+mine.text=" + as_override("a\n#SBATCH --exclusive\r\n\t\x85\u2028é")]),
    "container": (["--container", "registry/image:1.0", "--mounts", "/a:/b"], []),
    "venv": (["--before", "source '.venv/bin/activate'\nulimit -c 0", "--env", "MINE=a 'b'\n$c $(d) $$"], []),
    "pools": ([], POOLS),
}
CASES = [(engine, command) for engine in ENGINES for command in COMMANDS if (engine, command) != ("ssh", "container")]


@pytest.fixture
def files(rendered: Rendered) -> Any:
    def write(engine: str, command: str) -> tuple[Path, list[str]]:
        options, words = COMMANDS[command]
        words = [
            *RUN,
            *(["trainer.default_local_dir=/shared/run"] if engine in ("kuberay", "skypilot") else []),
            *words,
        ]
        return rendered(engine, [*NEEDED[engine], *options], words), words

    return write


def scripts(engine: str, file: Path) -> list[str]:
    """The programs of bash in a file, as they are run."""
    text = file.read_text()
    if engine in ("slurm", "ssh"):
        return [text]
    document = yaml.safe_load(text)
    if engine == "skypilot":
        return [document["run"]]
    return [document["spec"]["entrypoint"], container_environment(document)["HYBRIDRL_COMMAND"]]


def container_environment(document: dict) -> dict[str, str]:
    """The variables of the head as Kubernetes sets them: $$ is $."""
    head = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return {item["name"]: item["value"].replace("$$", "$") for item in head["env"]}


@pytest.mark.parametrize(("engine", "command"), CASES)
def test_a_file_is_read_by_bash_and_by_the_schema_and_has_the_words_of_the_command(engine, command, files, tmp_path):
    file, words = files(engine, command)
    for text in scripts(engine, file):
        checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
        bashlex.parse(text)
    if engine in ("kuberay", "skypilot"):
        jsonschema.validate(yaml.safe_load(file.read_text()), json.loads((PLACE / f"{engine}.json").read_text()))
    assert passed_words(engine, file, tmp_path)[-len(words) :] == words


def passed_words(engine: str, file: Path, place: Path) -> list[str]:
    """The words that the program in place of the driver gets."""
    programs = place / "programs"
    programs.mkdir()
    record = '#!/bin/bash\n[ "$1" = train ] || { echo 10.0.0.1; exit; }\nprintf "%s\\0" "${@:2}" >"$WORDS"\n'
    nothing = "#!/bin/bash\n"
    step = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n[ "$5" != hybridrl ] || "$@"\n'
    for name, text in {"hybridrl": record, "ray": nothing, "srun": step, "ssh": nothing}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (place / "sky_templates" / "ray").mkdir(parents=True)
    (place / "sky_templates" / "ray" / "start_cluster").write_text(nothing)
    (place / "sky_templates" / "ray" / "start_cluster").chmod(0o755)
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / ".venv" / "bin" / "activate").touch()
    variables = {
        "WORDS": str(place / "words"),
        "HOME": str(place),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "a\nb",
    }
    variables |= {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a,b",
        "PATH": f"{programs}:{PLACE / 'fakes'}:{os.environ['PATH']}",
    }
    command = scripts(engine, file)[0]
    if engine == "kuberay":  # the submitter's shell, then Ray, then that of the head
        variables |= container_environment(yaml.safe_load(file.read_text()))
        command = subprocess.list2cmdline(shlex.split(command))
    shell = ["sh" if engine == "kuberay" else "bash", "-c", command]
    done = subprocess.run(shell, env=os.environ | variables, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return (place / "words").read_bytes().decode().split("\0")[:-1]
