// Who is there: workers by role with load and KV, the KV that flows between them, and the frontends.

import { bytes, h, keyed, milliseconds, number, percent, rate, setText, setWidth } from "./dom.js";

const ROLES = ["prefill", "decode", "both"];
/** So many workers and more are drawn as small cells. */
const DENSE_FROM = 49;
const MAX_FLOWS = 16;

export function fleet(section) {
  const groups = h("div", { class: "roles" });
  const detail = h("p", { class: "detail", hidden: "" });
  let chosen = null;
  let latest = null;
  section.append(groups, detail);
  groups.addEventListener("click", (event) => {
    const id = event.target.closest(".worker")?.dataset.id ?? null;
    chosen = id === chosen ? null : id;
    describe();
  });

  function describe() {
    const worker = latest?.workers.find(({ id }) => id === chosen);
    detail.hidden = !worker;
    if (worker) setText(detail, sentence(worker));
    for (const cell of groups.querySelectorAll(".worker")) cell.classList.toggle("chosen", cell.dataset.id === chosen);
  }

  return ({ snapshot }) => {
    latest = snapshot;
    if (!snapshot?.workers.length) return false;
    groups.classList.toggle("dense", snapshot.workers.length >= DENSE_FROM);
    const present = ROLES.map((role) => [role, snapshot.workers.filter((worker) => worker.role === role)]);
    keyed(groups, present.filter(([, workers]) => workers.length), ([role]) => role, makeGroup, updateGroup);
    describe();
    return true;
  };
}

function makeGroup([role]) {
  return h("div", { class: `role ${role}` }, h("h3"), h("div", { class: "workers" }));
}

function updateGroup(group, [role, workers]) {
  const sum = (name) => workers.reduce((total, worker) => total + (worker[name] ?? 0), 0);
  const speed = role === "prefill" ? "prefill_tokens_per_s" : "tokens_per_s";
  const load = `${number(sum("running"))} running, ${number(sum("waiting"))} waiting`;
  const title = `${workers.length} ${role} · ${load} · ${rate(sum(speed))} tokens/s · KV ${percent(sum("kv_used"), sum("kv_total"))}`;
  setText(group.querySelector("h3"), title);
  keyed(group.querySelector(".workers"), workers, ({ id }) => id, makeWorker, updateWorker);
}

function makeWorker({ id }) {
  const bar = h("span", { class: "bar" }, h("span", { class: "fill" }));
  return h("button", { class: "worker", "data-id": id }, h("b", {}, id), bar, h("span", { class: "figures" }));
}

function updateWorker(cell, worker) {
  cell.className = `worker ${worker.state}${worker.waiting ? " waits" : ""}${cell.classList.contains("chosen") ? " chosen" : ""}`;
  const share = worker.kv_total ? worker.kv_used / worker.kv_total : 0;
  const fill = cell.querySelector(".fill");
  setWidth(fill, share);
  fill.classList.toggle("full", share >= 0.95);
  const speed = worker.role === "prefill" ? worker.prefill_tokens_per_s : worker.tokens_per_s;
  const load = `${number(worker.running)} run · ${number(worker.waiting)} wait · ${rate(speed)}/s`;
  setText(cell.querySelector(".figures"), worker.state === "ready" ? load : worker.state);
  cell.title = sentence(worker);
}

function sentence(worker) {
  const heard = worker.age_s === null ? "has not reported to this frontend" : `reported ${number(worker.age_s, 1)} s ago`;
  const parts = [
    `${worker.id}: ${worker.state}, ${worker.role}, ${worker.model}, ${worker.engine} on ${worker.host || "?"}, ${heard}`,
    `${number(worker.running)} of ${number(worker.slots)} running, ${number(worker.waiting)} waiting`,
    `KV ${number(worker.kv_used)} of ${number(worker.kv_total)} blocks, demand ${percent(worker.kv_demand ?? 0, 1)}`,
    `${number(worker.prefill_tokens_queued)} prompt tokens to compute` +
      (worker.prefill_s_queued === null ? "" : ` (${milliseconds(1e3 * worker.prefill_s_queued)})`),
    `${rate(worker.prefill_tokens_per_s)} prompt and ${rate(worker.tokens_per_s)} answer tokens/s`,
    `prefix hits ${percent(worker.prefix_hit_rate ?? 0, 1)}`,
    `kvrelay ${worker.release || "of an earlier release"}`,
  ];
  return parts.join(" · ");
}

export function flows(section) {
  const table = h("div", { class: "flows" });
  const rest = h("p", { class: "note" });
  section.append(table, rest);
  let before = new Map();
  return ({ snapshot }) => {
    if (!snapshot?.flows.length) return false;
    const now = snapshot.now_unix;
    const shown = snapshot.flows.map((flow) => {
      const key = `${flow.source}\n${flow.target}`;
      const old = before.get(key);
      const isNew = !old || now > old.now;
      const perSecond = old && isNew ? Math.max(flow.bytes - old.bytes, 0) / (now - old.now) : (old?.perSecond ?? 0);
      return { ...flow, key, now, perSecond };
    });
    before = new Map(shown.map((flow) => [flow.key, flow]));
    shown.sort((one, other) => other.perSecond - one.perSecond || other.bytes - one.bytes);
    const largest = Math.max(1, ...shown.map((flow) => flow.bytes));
    keyed(table, shown.slice(0, MAX_FLOWS), ({ key }) => key, makeFlow, (row, flow) => updateFlow(row, flow, largest));
    const hidden = shown.slice(MAX_FLOWS);
    const sum = bytes(hidden.reduce((total, flow) => total + flow.bytes, 0));
    setText(rest, hidden.length ? `and ${number(hidden.length)} more pairs with ${sum}` : "");
    return true;
  };
}

function makeFlow({ source, target }) {
  const bar = h("span", { class: "bar" }, h("span", { class: "fill" }));
  const pair = h("b", {}, h("span", {}, source), h("i", {}, " → "), h("span", {}, target));
  return h("div", { class: "flow" }, pair, bar, h("span", { class: "figures" }));
}

function updateFlow(row, flow, largest) {
  setWidth(row.querySelector(".fill"), flow.bytes / largest);
  const speed = `${bytes(flow.perSecond)}/s`;
  const text = `${speed} · ${bytes(flow.bytes)} in ${number(flow.transfers)} · ${milliseconds(flow.mean_ms)} each`;
  setText(row.querySelector(".figures"), text);
  row.classList.toggle("moving", flow.perSecond > 0);
}

export function frontends(section) {
  const body = h("tbody");
  const names = ["frontend", "requests/s", "tokens/s", "in flight", "failed", "release"];
  const head = h("thead", {}, h("tr", {}, ...names.map((name) => h("th", {}, name))));
  section.append(h("div", { class: "scroll" }, h("table", {}, head, body)));
  return ({ snapshot }) => {
    if (!snapshot) return false;
    const rows = snapshot.frontends.map((frontend) => {
      const figures = [
        `${frontend.id || "this one"}${frontend.is_self ? " (asked)" : ""} ${frontend.host}:${frontend.pid}`,
        rate(frontend.requests_per_s),
        rate(frontend.tokens_per_s),
        number(frontend.in_flight),
        `${number(frontend.failed_last_minute)} of ${number(frontend.requests_last_minute)}`,
        frontend.is_silent ? "does not answer" : frontend.release,
      ];
      return h("tr", { class: frontend.is_silent ? "silent" : null }, ...figures.map((text) => h("td", {}, text)));
    });
    body.replaceChildren(...rows);
    return true;
  };
}
