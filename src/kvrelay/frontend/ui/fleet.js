// Who is there: workers by role with load and KV, the KV that flows between them, and the frontends.

import { bytes, emptyBar, h, keyed, milliseconds, number, percent, rate, seconds, setText, setWidth, table } from "./dom.js";

const ROLES = ["prefill", "decode", "both"];
/** So many workers and more are drawn as small cells. */
const DENSE_FROM = 49;
const MAX_FLOWS = 16;

export function fleet(section) {
  const groups = h("div", { class: "roles" });
  /** Workers that a line at the top names: their colour is that line's. */
  const severities = new Map();
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
    severities.clear();
    // The worst comes first, so it is set last.
    for (const { severity, workers } of [...snapshot.wrong_now].reverse()) {
      for (const id of workers) severities.set(id, severity);
    }
    const present = ROLES.map((role) => [role, snapshot.workers.filter((worker) => worker.role === role)]);
    const shown = present.flatMap(([role, workers]) => inGroups(role, workers));
    keyed(groups, shown, ({ key }) => key, makeGroup, (group, item) => updateGroup(group, item, severities));
    describe();
    return true;
  };
}

/** Workers of a role that are in no data-parallel group, then each group, by rank. */
function inGroups(role, workers) {
  const groups = Map.groupBy(workers, (worker) => worker.dp_group ?? "");
  return [...groups.entries()]
    .sort(([one], [other]) => one.localeCompare(other))
    .map(([group, members]) => ({
      key: `${role} ${group}`,
      role,
      group,
      workers: group ? members.toSorted((one, other) => one.dp_rank - other.dp_rank) : members,
    }));
}

function makeGroup({ role }) {
  return h("div", { class: `role ${role}` }, h("h3"), h("div", { class: "workers" }));
}

function updateGroup(element, { role, group, workers }, severities) {
  const sum = (name) => workers.reduce((total, worker) => total + (worker[name] ?? 0), 0);
  const speed = role === "prefill" ? "prefill_tokens_per_s" : "tokens_per_s";
  const load = `${number(sum("running"))} running, ${number(sum("waiting"))} waiting`;
  const what = group ? `${role}, data-parallel group ${group}: ${workers.length} ranks` : `${workers.length} ${role}`;
  const title = `${what} · ${load} · ${rate(sum(speed))} tokens/s · KV ${percent(sum("kv_used"), sum("kv_total"))}`;
  setText(element.querySelector("h3"), title);
  keyed(element.querySelector(".workers"), workers, ({ id }) => id, makeWorker, (cell, worker) => updateWorker(cell, worker, severities));
}

function makeWorker({ id }) {
  return h("button", { class: "worker", "data-id": id }, h("b", {}, id), emptyBar(), h("span", { class: "figures" }));
}

function updateWorker(cell, worker, severities) {
  cell.className = `worker ${worker.state} ${severities.get(worker.id) ?? ""}${cell.classList.contains("chosen") ? " chosen" : ""}`;
  const share = worker.kv_total ? worker.kv_used / worker.kv_total : 0;
  const fill = cell.querySelector(".fill");
  setWidth(fill, share);
  const speed = worker.role === "prefill" ? worker.prefill_tokens_per_s : worker.tokens_per_s;
  const load = `${number(worker.running)} run · ${number(worker.waiting)} wait · ${rate(speed)}/s`;
  setText(cell.querySelector(".figures"), worker.state === "ready" ? load : worker.state);
  setText(cell.querySelector("b"), worker.dp_group ? `rank ${worker.dp_rank} · ${worker.id}` : worker.id);
  cell.title = sentence(worker);
}

function sentence(worker) {
  const heard = worker.age_s === null ? "has not reported to this frontend" : `reported ${number(worker.age_s, 1)} s ago`;
  const parts = [
    `${worker.id}: ${worker.state}, ${worker.role}, ${worker.model}, ${worker.engine} on ${worker.host || "?"}, ${heard}`,
    `${number(worker.running)} of ${number(worker.slots)} running, ${number(worker.waiting)} waiting`,
    `KV ${number(worker.kv_used)} of ${number(worker.kv_total)} blocks, demand ${percent(worker.kv_demand ?? 0, 1)}`,
    `${number(worker.prefill_tokens_queued)} prompt tokens to compute` +
      (worker.prefill_s_queued === null ? "" : ` (${seconds(worker.prefill_s_queued)})`),
    `${rate(worker.prefill_tokens_per_s)} prompt and ${rate(worker.tokens_per_s)} answer tokens/s`,
    `prefix hits ${percent(worker.prefix_hit_rate ?? 0, 1)}`,
    worker.drafted_tokens
      ? `${percent(worker.accepted_tokens, worker.drafted_tokens)} of ${number(worker.drafted_tokens)} drafted tokens accepted, ` +
        `${number(worker.tokens_per_step, 1)} tokens a step`
      : "",
    worker.dp_group ? `rank ${worker.dp_rank} of data-parallel group ${worker.dp_group}` : "",
    worker.adapters?.length ? `adapters ${worker.adapters.join(", ")}` : "",
    ...Object.entries(worker.refused_adapters ?? {}).map(([id, reason]) => `refuses adapter ${id}: ${reason}`),
    worker.problem ? `no connection: ${worker.problem}` : "",
    processText(worker),
    worker.after_crash ? `restarted after ${worker.after_crash}` : "",
    `kvrelay ${worker.release || "of an earlier release"}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

export function processText({ cpu_cores, rss_bytes }) {
  return rss_bytes ? `${rate(cpu_cores)} cores, ${bytes(rss_bytes)} of memory` : "";
}

export function flows(section) {
  const list = h("div", { class: "flows" });
  const rest = h("p", { class: "note" });
  section.append(list, rest);
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
    keyed(list, shown.slice(0, MAX_FLOWS), ({ key }) => key, makeFlow, (row, flow) => updateFlow(row, flow, largest));
    const { num_flows, flow_bytes } = snapshot.total;
    const hidden = num_flows - Math.min(shown.length, MAX_FLOWS);
    setText(rest, hidden ? `and ${number(hidden)} more; all ${number(num_flows)} have moved ${bytes(flow_bytes)}` : "");
    rest.hidden = !hidden;
    return true;
  };
}

function makeFlow({ source, target }) {
  const pair = h("b", {}, h("span", {}, source), h("i", {}, " → "), h("span", {}, target));
  return h("div", { class: "flow" }, pair, emptyBar(), h("span", { class: "figures" }));
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
  const names = ["frontend", "answered/s", "tokens/s", "in flight", "answered", "refused", "failed", "of", "process", "release"];
  section.append(table(names, body));
  return ({ snapshot }) => {
    if (!snapshot) return false;
    const rows = snapshot.frontends.map((frontend) => {
      const figures = [
        `${frontend.id || "this one"}${frontend.is_self ? " (asked)" : ""} ${frontend.host}:${frontend.pid}`,
        rate(frontend.answered_per_s),
        rate(frontend.tokens_per_s),
        number(frontend.in_flight),
        ...["answered", "refused", "failed"].map((name) => number(frontend[`${name}_last_minute`])),
        `${number(frontend.requests_last_minute)} in a minute`,
        processText(frontend),
        frontend.is_silent ? "does not answer" : frontend.release,
      ];
      return h("tr", { class: frontend.is_silent ? "silent" : null }, ...figures.map((text) => h("td", {}, text)));
    });
    body.replaceChildren(...rows);
    return true;
  };
}
