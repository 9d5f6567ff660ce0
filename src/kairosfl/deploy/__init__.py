"""Deployment over Flower, for operators: new apps, certificates, nodes, the server of a run, its
status, and rehearsals on one machine.

The engine `kairosfl.engines.flower` carries briefs and reports; what is started or read by hand is
here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kairosfl.errors import UserError
from kairosfl.lazy import attach

if find_spec("flwr") is None:
    raise UserError("Deployment needs Flower; install it with: pip install 'kairosfl[flower]'.")

if TYPE_CHECKING:
    from kairosfl.deploy.certificates import certs
    from kairosfl.deploy.local import LocalFederation
    from kairosfl.deploy.rehearsal import rehearsal_app, rehearse, run_to_end
    from kairosfl.deploy.server import Remote, model_of, serve, server_app
    from kairosfl.deploy.settings import Deploy, load
    from kairosfl.deploy.templates import new
else:  # a node, which needs none of this, does not wait for torch
    __getattr__, __dir__ = attach(
        "kairosfl.deploy",
        {
            "Deploy": "kairosfl.deploy.settings",
            "LocalFederation": "kairosfl.deploy.local",
            "Remote": "kairosfl.deploy.server",
            "certs": "kairosfl.deploy.certificates",
            "load": "kairosfl.deploy.settings",
            "model_of": "kairosfl.deploy.server",
            "new": "kairosfl.deploy.templates",
            "rehearsal_app": "kairosfl.deploy.rehearsal",
            "rehearse": "kairosfl.deploy.rehearsal",
            "run_to_end": "kairosfl.deploy.rehearsal",
            "serve": "kairosfl.deploy.server",
            "server_app": "kairosfl.deploy.server",
        },
    )

__all__ = [
    "Deploy",
    "LocalFederation",
    "Remote",
    "certs",
    "load",
    "model_of",
    "new",
    "rehearsal_app",
    "rehearse",
    "run_to_end",
    "serve",
    "server_app",
]
