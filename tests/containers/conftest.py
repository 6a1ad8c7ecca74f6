import os
import secrets

import pytest
import torch
from tests.containers.client_program import PICTURES, picture
from tests.containers.engine import Project, build, docker, why_none

from jurybox.server.jurors import panel


@pytest.fixture(scope="session")
def images():
    """The images by target, built from this tree; JURYBOX_TEST_IMAGES=NAME:TAG names those that are there already."""
    if why := why_none():
        pytest.skip(why)
    if there := os.environ.pop("JURYBOX_TEST_IMAGES", None):  # servers on this host would take it for a setting
        name, _, tag = there.partition(":")
        yield {"server": there, "client": f"{name}-client:{tag}", "training": f"{name}-training:{tag}", "name": name,
               "tag": tag}  # fmt: skip
        return
    name, tag = "jurybox-test", secrets.token_hex(3)
    yield {"server": build("server", f"{name}:{tag}"), "client": build("client", f"{name}-client:{tag}"),
           "name": name, "tag": tag}  # fmt: skip
    docker("image", "rm", "--force", f"{name}:{tag}", f"{name}-client:{tag}", f"{name}-training:{tag}", check=False)


@pytest.fixture(scope="session")
def image(images):
    """The image of the trainings."""
    return images.get("training") or build("training", f"{images['name']}-training:{images['tag']}")


@pytest.fixture(scope="session")
def scores():
    """What the jury gives each picture of the client program, computed in this process."""
    with torch.inference_mode():
        return [
            float(panel().module(torch.from_numpy(picture(number))[None])["score"][0]) for number in range(PICTURES)
        ]


@pytest.fixture(scope="module")
def project(images):
    """`docker compose up`, healthy."""
    project = Project(images["name"], images["tag"])
    try:
        project.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "180", timeout=200)
        yield project
    finally:
        project.down()
