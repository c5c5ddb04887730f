// Reads /debug every second and hands it to the views. A frontend that restarts or is away is asked again until it
// answers; meanwhile the last answer stays on the page, marked as old.

import { charts, rowsOf } from "./charts.js";
import { h, milliseconds, number, percent, rate, setText } from "./dom.js";
import { fleet, flows, frontends } from "./fleet.js";
import { planner } from "./planner.js";
import { latencies, prefills } from "./prefills.js";
import { requests } from "./requests.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 4000;
const HISTORY_S = 300;
const OVERLAP_S = 5;
const DEBUG = new URL("../debug/", document.baseURI);

/** A view has a title and build(section) -> update(state), which returns whether there is anything to show.
 */
const VIEWS = [
  { title: "Now", build: summary },
  { title: "Workers", build: fleet },
  { title: "Where prefills ran", build: prefills },
  { title: "Latency in the last minute", build: latencies },
  { title: "KV between workers", build: flows },
  { title: "History", build: charts },
  { title: "Requests", build: requests },
  { title: "Planner", build: planner },
  { title: "Frontends", build: frontends },
];

const state = { snapshot: null, history: new Map(), isForbidden: false, get };
const views = VIEWS.map(({ title, build }) => {
  const section = h("section", { hidden: "" }, h("h2", {}, title));
  document.querySelector("main").append(section);
  return { section, update: build(section, state) };
});

/** The JSON at `path` below /debug/; throws an Error with `status` for any other answer than 200. */
async function get(path) {
  const answer = await fetch(new URL(path, DEBUG), { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.ok) return answer.json();
  const text = (await answer.json().catch(() => null))?.error?.message;
  throw Object.assign(new Error(text ?? `status ${answer.status}`), { status: answer.status });
}

async function look() {
  const last = Math.max(0, ...state.history.keys());
  try {
    const snapshot = await get(`cluster?since=${Math.max(last - OVERLAP_S, 0)}`);
    remember(snapshot);
    state.snapshot = snapshot;
    state.isForbidden = false;
    connected(snapshot);
  } catch (error) {
    if (error.status === 403) {
      // A key that sees its own requests only: the frontend is there all the same.
      Object.assign(state, { snapshot: null, isForbidden: true });
      isLive(true);
      showWrong([], "This key sees its own requests. Keys of --metrics-keys-file see the whole cluster.");
    } else {
      isLive(false, error);
    }
  }
  for (const { section, update } of views) section.hidden = !update(state);
}

/** Take the history's new seconds over; those before five minutes are dropped. */
function remember({ history, now_unix }) {
  for (const [second, row] of rowsOf(history)) state.history.set(second, row);
  for (const second of state.history.keys()) {
    if (second < now_unix - HISTORY_S || second > now_unix) state.history.delete(second);
  }
}

function connected(snapshot) {
  isLive(true);
  setText(document.querySelector("#who"), `${snapshot.release} · ${location.host}`);
  showWrong(snapshot.wrong_now, "Nothing is wrong now.");
}

function isLive(yes, error = null) {
  const link = document.querySelector("#link");
  document.body.classList.toggle("old", !yes);
  link.className = yes ? "live" : "lost";
  const needsKey = error?.status === 401;
  setText(link, yes ? "live" : needsKey ? "the key is not valid: reload the page" : "reconnecting");
  link.title = error ? error.message : "";
}

/** The worst in one line; all of them when it is opened. */
function showWrong(found, otherwise) {
  const wrong = document.querySelector("#wrong");
  const [worst, ...rest] = found;
  wrong.className = worst ? worst.severity : "fine";
  const more = rest.length ? ` (and ${rest.length} more)` : "";
  setText(wrong.querySelector("summary"), worst ? worst.text + more : otherwise);
  const lines = found.map((item) => h("li", { class: item.severity }, item.text));
  wrong.querySelector("ul").replaceChildren(...lines);
}

function summary(section) {
  const tiles = h("dl", { class: "tiles" });
  section.append(tiles);
  return ({ snapshot }) => {
    if (!snapshot) return false;
    const { total, workers } = snapshot;
    const objectives = [total.slo_ttft_ms, total.slo_itl_ms].map(milliseconds).join(", ");
    const ended = `of ${number(total.requests_last_minute)} in 1 min`;
    const shown = [
      ["answered/s", rate(total.answered_per_s), `${number(total.in_flight)} in flight`],
      ["tokens/s", rate(total.tokens_per_s), `${rate(total.prompt_tokens_per_s)} of prompts`],
      ["first token", milliseconds(total.ttft_ms.p50), `p95 ${milliseconds(total.ttft_ms.p95)}`],
      ["between tokens", milliseconds(total.itl_ms.p50), `p95 ${milliseconds(total.itl_ms.p95)}`],
      ["KV in use", percent(total.kv_used, total.kv_total), `${number(total.kv_total)} blocks`],
      ["running", number(total.running), `${number(total.waiting)} waiting`],
      ["prefill queue", number(total.prefill_queue), `prefill workers: ${number(workers.filter(isPrefill).length)}`],
      ["in time", percent(total.in_time_last_minute, total.judged_last_minute), objectives],
      ["refused", number(total.refused_last_minute), ended],
      ["failed", number(total.failed_last_minute), ended],
    ];
    tiles.replaceChildren(
      ...shown.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), h("small", {}, note))),
    );
    return true;
  };
}

function isPrefill(worker) {
  return worker.role === "prefill";
}

for (;;) {
  const begun = performance.now();
  if (!document.hidden) await look();
  await new Promise((done) => setTimeout(done, Math.max(INTERVAL_MS - (performance.now() - begun), 100)));
}
