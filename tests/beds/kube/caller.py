"""Requests from inside a bed's network: nobody listens to its addresses outside of it."""

import json
import subprocess
import sys
from collections.abc import Sequence

_REQUEST = """
import ssl, sys, urllib.error, urllib.request
method, url, token, authority, own, kind, body = sys.argv[1:]
headers = {"Content-Type": kind, **({"Authorization": "Bearer " + token} if token else {})}
context = ssl.create_default_context(cafile=authority) if authority else None
if own:
    context.load_cert_chain(own, own)
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
)
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
try:
    with opener.open(request, timeout=30) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


class Caller:
    """Asks one server; each request is a process.

    Args:
        enter: the command that goes into the network.
        token: what it shows.
        authority: file of the certificate authority it trusts.
        own: file with the key and the certificate it shows.
    """

    def __init__(
        self, enter: Sequence[str], url: str, *, token: str = "", authority: str = "", own: str = ""
    ) -> None:
        self._enter, self._url = list(enter), url
        self._credentials = [token, authority, own]

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Status and text; status 0 while nobody listens."""
        said = self.asking(method, path, body).communicate(timeout=60)[0]
        status, _, text = said.partition(" ")
        return int(status), text.strip()

    def asking(self, method: str, path: str, body: object = None) -> subprocess.Popen[str]:
        """The same as a process, for who does not wait for the answer."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        text = "" if body is None else json.dumps(body)
        words = [method, self._url + path, *self._credentials, kind, text]
        command = [*self._enter, sys.executable, "-c", _REQUEST, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
