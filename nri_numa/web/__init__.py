"""The HTTP side: metrics, health, the API and the page; read-only, imported only when it is on."""
