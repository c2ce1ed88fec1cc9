"""TLS whose certificate can be changed while it is served."""

import asyncio
import asyncio.sslproto
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)
CHECK_SECONDS = 5.0
BUFFER_BYTES = 16 * 1024
"""One record. asyncio keeps a quarter of a megabyte for each connection, used or not."""


class Certificate:
    """A certificate and its key, in files that somebody renews (a mounted Secret)."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load them.

        :raises OSError: a file cannot be read.
        :raises ssl.SSLError: they are no certificate and key, or do not belong together.
        """
        self._files = certificate, key
        self._loaded = self._stamp()
        self.context = self._load()
        self._trouble = ""
        asyncio.sslproto.SSLProtocol.max_size = BUFFER_BYTES

    async def follow(self) -> None:
        """Load them again whenever they change, for the connections that come then."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Load them again if they changed; what cannot be loaded changes nothing."""
        try:
            stamp = self._stamp()
            if stamp == self._loaded:
                return
            # Into one of its own first: a key that does not fit would leave half of the pair.
            self._load()
            self._load_into(self.context)
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._trouble:
                log.warning("the new certificate %s is not used: %s", self._files[0], error)
            self._trouble = str(error)
            return
        self._loaded, self._trouble = stamp, ""
        log.info("the certificate %s was loaded again", self._files[0])

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        # No password: for a key that needs one, OpenSSL would ask on the terminal.
        context.load_cert_chain(*self._files, password="")

    def _stamp(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files)
