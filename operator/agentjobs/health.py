"""HTTP for the platform: /healthz, /readyz, /metrics."""

from collections.abc import Callable

from aiohttp import web

from agentjobs.metrics import OPEN_METRICS, Metrics


def make_app(
    metrics: Metrics, *, ready: Callable[[], str], refresh: Callable[[], None]
) -> web.Application:
    """Build the application.

    :param ready: returns why the process is not ready; empty when it is.
    :param refresh: brings gauges up to date before they are read.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def show_metrics(_: web.Request) -> web.Response:
        refresh()
        headers = {"Content-Type": OPEN_METRICS}
        return web.Response(body=metrics.render(), headers=headers)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", show_metrics)
    return app


async def serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Start to serve; `cleanup()` of what is returned ends it.

    :raises OSError: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
