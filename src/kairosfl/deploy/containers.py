"""Container and compose files of a new app, for the server and for a device."""

from __future__ import annotations

CONTAINERFILE = """\
# One image for the server and the devices: docker build -t {name} -f Containerfile .
FROM python:3.12-slim
ARG KAIROSFL="kairosfl[flower]"   # or a path or URL that pip can install; pin the version in production
RUN pip install --no-cache-dir "$KAIROSFL" && useradd --create-home --uid 10001 kairos \\
    && install -d -o kairos /srv/home /srv/state /srv/runs /srv/kept
ENV FLWR_HOME=/srv/home KAIROSFL_KEPT=/srv/kept FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \\
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
USER kairos
WORKDIR /srv
"""

COMPOSE = """\
# Server:    docker compose up -d superlink
# Train:     docker compose exec superlink flwr run /srv/app {name} --stream \\
#                --run-config 'run="/srv/run.toml" out="/srv/runs/first"'
# A device:  SERVER=fl.example.org CLIENTS=0 KEY=certs/node-0 docker compose up -d node
x-kairos: &kairos
  image: {name}
  build: {{ context: ., dockerfile: Containerfile }}
  restart: always
  init: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]

services:
  superlink:
    <<: *kairos
    ports: ["8000:8000"]   # expose only /v1/fleet/ to the outside; see the documentation
    command:
      - flower-superlink
      - --host=0.0.0.0
      - --port=8000
      - --database=/srv/state/state.db
      - --enable-supernode-auth
      - --ssl-ca-certfile=/srv/certs/ca.crt
      - --ssl-certfile=/srv/certs/server.pem
      - --ssl-keyfile=/srv/certs/server.key
    configs: [{{ source: flower, target: /srv/home/config.toml }}]
    volumes:
      - ./certs/ca.crt:/srv/certs/ca.crt:ro
      - ./certs/server.pem:/srv/certs/server.pem:ro
      - ./certs/server.key:/srv/certs/server.key:ro
      - ./app:/srv/app:ro
      - ./run.toml:/srv/run.toml:ro
      - state:/srv/state
      - runs:/srv/runs

  node:
    <<: *kairos
    profiles: [device]
    command:
      - kairosfl
      - deploy
      - node
      - --superlink=${{SERVER:-superlink}}:8000
      - --root-certificates=/srv/certs/ca.crt
      - --auth-supernode-private-key=/srv/certs/node
      - --node-config=clients="${{CLIENTS:-0}}"
    volumes:
      - ./certs/ca.crt:/srv/certs/ca.crt:ro
      - ./${{KEY:-certs/node-0}}:/srv/certs/node:ro
      - ./data:/srv/data:ro   # what task.py reads on this device
      - kept:/srv/kept        # what its clients keep, if the algorithm asks for it

configs:
  flower:
    content: |
      [superlink.{name}]
      address = "localhost:8000"
      root-certificates = "/srv/certs/ca.crt"

volumes:
  state:
  runs:
  kept:
"""
