// Talks to the agent: documents, and the stream of changes. fetch() carries the stream too, since
// an EventSource cannot send the Authorization header.

const SILENCE = 40000; // the agent says something at least every 15 s

let token = sessionStorage.getItem("nri-numa-token") || "";

export class Unauthorized extends Error {}

export function setToken(value) {
  token = value;
  sessionStorage.setItem("nri-numa-token", value);
}

async function request(path, signal) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (response.status === 401) throw new Unauthorized();
  return response;
}

/** The document at a path; an Error with the agent's message when there is none. */
export async function get(path) {
  const response = await request(path, AbortSignal.timeout(20000));
  const document_ = await response.json();
  if (!response.ok) throw new Error(document_.error ? document_.error.message : response.statusText);
  return document_;
}

/** Call onState for every change until the stream ends or falls silent; then throws. */
export async function follow(onState) {
  const abort = new AbortController();
  let watch = setTimeout(() => abort.abort(), SILENCE);
  try {
    const response = await request("v1/events", abort.signal);
    if (!response.ok) throw new Error(`the agent answered ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the agent closed the connection");
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), SILENCE);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) onState(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watch);
    abort.abort();
  }
}
