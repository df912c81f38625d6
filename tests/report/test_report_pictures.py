import json
import re
from html import unescape

from capi.report.pages.data import Emergence, PrototypeStrip, RunReport
from capi.report.pages.pictures import emergence, gallery
from tests.report.report_runs import PIXEL, run_report

STATE = run_report().state


def test__each_image_has_its_photo_its_newest_picture_and_all_steps() -> None:
    images = [Emergence(number, PIXEL, [(0, PIXEL), (2000, PIXEL)]) for number in range(3)]
    shown = emergence(RunReport("run", STATE, emergence=images))
    assert shown.count("<figure") == 3
    assert shown.count("<img") == 3 * (1 + 1 + 2)
    assert 'Image 1, <span class="when">step 2,000</span>' in shown
    steps = re.search(r'data-steps="([^"]*)"', shown)
    assert steps
    assert json.loads(unescape(steps[1])) == [0, 2000]


def test__steps_of_all_images_are_on_the_slider() -> None:
    images = [Emergence(0, PIXEL, [(0, PIXEL)]), Emergence(1, None, [(5, PIXEL)])]
    shown = emergence(RunReport("run", STATE, emergence=images))
    assert 'data-steps="[0, 5]"' in shown
    assert "The photo is missing." in shown


def test__notes_are_text() -> None:
    run = RunReport("run", STATE, emergence_note="none <b>", prototypes_note="none <i>")
    assert "none &lt;b&gt;" in emergence(run)
    assert "none &lt;i&gt;" in gallery(run)


def test__prototypes_have_number_and_share() -> None:
    shown = gallery(
        RunReport("run", STATE, prototypes=[PrototypeStrip(7, 0.0123, PIXEL), PrototypeStrip(9, None, PIXEL)])
    )
    assert "Prototype 7 · 1.23% of the patches" in shown
    assert "Prototype 9<" in shown
    rare = gallery(RunReport("run", STATE, prototypes=[PrototypeStrip(7, 0.00001, PIXEL)]))
    assert "less than 0.01%" in unescape(rare)


def test__many_prototypes_wait_behind_a_fold() -> None:
    shown = gallery(RunReport("run", STATE, prototypes=[PrototypeStrip(one, 0.1, PIXEL) for one in range(30)]))
    assert "6 more prototypes" in shown
    assert shown.count("<img") == 30
