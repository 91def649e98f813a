// What is new, said to those who listen instead of looking: politely, and not all the time.

const PAUSE = 3000; // ms; a rollout becomes one sentence instead of fifty
const NAMED = 3;

let containers = null; // ids that were there at the last look
let refused = 0; // when the newest refusal was that has been said
let waiting = { came: [], went: 0, refused: [] };
let timer = 0;

const harmless = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, " ");
const named = (list) => list.slice(0, NAMED).join(", ") + (list.length > NAMED ? ` and ${list.length - NAMED} more` : "");

/** Compare with what was there before; the first look says nothing. */
export function announce(place, { assignments, rejections }) {
  const now = new Map(assignments.containers.map((c) => [c.id, `${c.namespace}/${c.pod}`]));
  const newest = Math.max(0, ...rejections.map((r) => r.lastTime));
  if (containers !== null) {
    for (const [id, name] of now) if (!containers.has(id)) waiting.came.push(name);
    for (const id of containers.keys()) if (!now.has(id)) waiting.went++;
    for (const r of rejections) if (r.lastTime > refused) waiting.refused.push(`${r.namespace}/${r.pod}, ${r.reason}`);
  }
  containers = now;
  refused = Math.max(refused, newest);
  if (!timer && (waiting.came.length || waiting.went || waiting.refused.length)) {
    timer = setTimeout(() => say(place), PAUSE);
  }
}

function say(place) {
  const { came, went, refused: no } = waiting;
  waiting = { came: [], went: 0, refused: [] };
  timer = 0;
  place.textContent = harmless([no.length && `Rejected: ${named(no)}.`, came.length && `New: ${named(came)}.`,
    went && `${went} ${went === 1 ? "container" : "containers"} gone.`].filter(Boolean).join(" "));
}
