"""Composition root: settings, clients, and the order in which programs start."""

import argparse
import asyncio
import gc
import logging
import os
import sys

from agentjobs import __version__, codec
from agentjobs.domain.destinations import Destinations
from agentjobs.domain.errors import AgentJobError
from agentjobs.gateway.run import Gateway
from agentjobs.health import make_app, serve
from agentjobs.kube import Access, Kube, KubeError, NoClusterError, UnavailableError
from agentjobs.logs import set_up
from agentjobs.lookups import LookUps
from agentjobs.metrics import GatewayMetrics, Metrics
from agentjobs.operator import Operator
from agentjobs.settings import GatewaySettings, Settings, SettingsError
from agentjobs.signing import Signer, load_signer
from agentjobs.store import OutputStore

log = logging.getLogger(__name__)
GC_THRESHOLDS = (50_000, 50, 1000)
"""Lists of thousands of objects make garbage collection the larger part of a start."""
RETRY_SECONDS = 1.0
API_SERVER = "kubernetes.default.svc"
"""Its name inside, where what we are told is one for outside."""
GATEWAY_CONNECTIONS = 128
"""To the API server: one for each start or review that is under way."""
GATEWAY_SECONDS = 10.0
"""A caller who waits for an API server that hangs is better told to come again."""


def main(argv: list[str] | None = None) -> int:
    """Run a program of the package; return its exit code: 0 ended, 1 start again, 2 misuse."""
    parser = argparse.ArgumentParser(prog="agentjobs", description="Programs of agentjobs.")
    parser.add_argument("--version", action="version", version=__version__)
    programs = parser.add_subparsers(dest="program", required=True)
    programs.add_parser("operator", help="run the operator")
    programs.add_parser("gateway", help="run the gateway")
    program = parser.parse_args(argv).program
    try:
        if program == "gateway":
            gateway = GatewaySettings.from_environment(os.environ)
            set_up(gateway.log_level.upper(), gateway.log_format)
            return asyncio.run(run_gateway(gateway, Access.find()))
        settings = Settings.from_environment(os.environ)
        set_up(settings.log_level.upper(), settings.log_format)
        return asyncio.run(run_operator(settings, Access.find()))
    except (SettingsError, NoClusterError) as error:
        sys.stderr.write(f"agentjobs: {error}\n")
        return 2


async def run_operator(settings: Settings, access: Access) -> int:
    """Run the operator until a signal comes; 1 if it must be started again."""
    gc.set_threshold(*GC_THRESHOLDS)
    codec.allow_depth()
    destinations = await destinations_of(settings, access)
    metrics = Metrics()
    async with Kube(access) as kube:
        operator = Operator(settings, access, kube, metrics, open_store(settings.output_store))
        app = make_app(metrics, ready=operator.not_ready, refresh=operator.refresh)
        try:
            runner = await serve(app, settings.listen, settings.port)
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {settings.listen}:{settings.port} ({error}); "
                "set AGENTJOBS_PORT to a free port"
            ) from error
        try:
            signer = await _signer(kube, settings.namespace)
            return await operator.run(signer, destinations)
        except AgentJobError as error:
            log.error("the operator cannot go on and starts again: %s", error)
            return 1
        finally:
            await runner.cleanup()


async def run_gateway(settings: GatewaySettings, access: Access) -> int:
    """Run the gateway until a signal comes."""
    gc.set_threshold(*GC_THRESHOLDS)
    codec.allow_depth()
    destinations = await destinations_of(settings, access)
    async with Kube(access, GATEWAY_CONNECTIONS, GATEWAY_SECONDS) as kube:
        store = open_store(settings.output_store)
        return await Gateway(settings, kube, GatewayMetrics(), destinations, store).run()


async def destinations_of(settings: Settings | GatewaySettings, access: Access) -> Destinations:
    """Where events may go; not to the API server, under any of its names.

    :raises SettingsError: a rule or a network is none.
    """
    found = await asyncio.gather(*map(LookUps().addresses_of, {access.host, API_SERVER}))
    api_server = [str(address) for addresses in found for address in addresses]
    try:
        return Destinations.from_json(
            settings.callbacks_allow,
            denied=(*api_server, *settings.callbacks_deny),
            insecure_loopback=settings.callbacks_insecure_loopback,
        )
    except ValueError as error:
        raise SettingsError(f"AGENTJOBS_CALLBACKS_ALLOW or _DENY: {error}") from error


def open_store(url: str) -> OutputStore | None:
    """Open the store of output, where there is one.

    :raises SettingsError: the URL is none of a store.
    """
    if not url:
        return None
    try:
        return OutputStore.open(url)
    except ValueError as error:
        raise SettingsError(f"AGENTJOBS_OUTPUT_STORE: {error}") from error


async def _signer(kube: Kube, namespace: str) -> Signer:
    while True:
        try:
            return await load_signer(kube, namespace)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        except (UnavailableError, KubeError) as error:
            # An API server that has just begun refuses for some seconds what it will allow.
            log.warning("the signing key cannot be read yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
