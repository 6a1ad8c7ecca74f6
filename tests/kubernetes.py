"""The manifests of deploy/kubernetes, put together as kustomize does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))


def rendered(overlay: str) -> dict[str, dict[str, Any]]:
    """The objects of an overlay, by kind and name."""
    folder = FOLDER / overlay
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: dict[str, dict[str, Any]] = {}
    for resource in kustomization["resources"]:
        if (folder / resource).is_dir():
            objects |= rendered((folder / resource).resolve().name)
        else:
            for document in yaml.safe_load_all((folder / resource).read_text()):
                objects[_key(document)] = document
    for patch in kustomization.get("patches", ()):
        document = yaml.safe_load((folder / patch["path"]).read_text())
        objects[_key(document)] = _merged(objects[_key(document)], document)
    for made in kustomization.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in made["files"]}
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data}
        objects[_key(document)] = document
    for image in kustomization.get("images", ()):
        for container in _containers(objects):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    return objects


def pod(overlay: str) -> dict[str, Any]:
    """The spec of the deployment's pod."""
    return rendered(overlay)["Deployment jurybox"]["spec"]["template"]["spec"]


def _key(document: dict[str, Any]) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def _containers(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    deployments = [each for each in objects.values() if each["kind"] == "Deployment"]
    return [container for each in deployments for container in each["spec"]["template"]["spec"]["containers"]]


def _merged(old: Any, new: Any) -> Any:
    """A strategic merge: lists of named objects by their names."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(each, dict) for each in [*old, *new]):
        there = {each["name"]: copy.deepcopy(each) for each in old}
        for each in new:
            there[each["name"]] = _merged(there.get(each["name"]), each)
        return list(there.values())
    return new
