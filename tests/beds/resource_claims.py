"""ResourceClaims as the API server has them."""

from typing import Any

DRIVER = "dra.example.com"


UID = "0a1b2c3d-0000-4000-8000-00000000000a"


def result(**changes: Any) -> dict[str, Any]:
    return {
        "request": "cpus",
        "driver": DRIVER,
        "pool": "n1",
        "device": "numa1",
        "consumedCapacity": {f"{DRIVER}/cpu": "4", f"{DRIVER}/memory": "1Gi"},
        "shareID": "s-1",
        **changes,
    }


def config(parameters: object, source: str = "FromClaim", *requests: str) -> dict[str, Any]:
    return {
        "source": source,
        "requests": list(requests),
        "opaque": {"driver": DRIVER, "parameters": parameters},
    }


def claim(*results: dict[str, Any], configs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"uid": UID, "namespace": "shop", "name": "four", "labels": {"a": "b"}},
        "spec": {"devices": {}},
        "status": {
            "allocation": {
                "devices": {"results": list(results) or [result()], "config": configs or []}
            },
            "reservedFor": [
                {"resource": "pods", "name": "web", "uid": "pod-1"},
                {"resource": "others", "name": "web", "uid": "no-pod"},
            ],
        },
    }
