// The list of kept requests, and the waterfall of the one that was clicked. Its id is in the page's address.

import { bytes, clock, emptyBar, h, keyed, milliseconds, number, seconds, setText, setWidth, table } from "./dom.js";

const ORDERS = ["recent", "slowest", "failed", "refused"];
const LIMIT = 100;
const PREFIX = "#request/";

export function requests(section, state) {
  const { get } = state;
  let order = "recent";
  let list = null;
  let isAsking = false;
  const buttons = ORDERS.map((name) => h("button", { "data-order": name, onclick: () => choose(name) }, name));
  const detail = h("article", { class: "waterfall", hidden: "" });
  const body = h("tbody");
  const names = ["received", "id", "status", "place", "tokens", "first token", "latency"];
  const note = h("p", { class: "note" });
  section.append(h("nav", {}, ...buttons), detail, table(names, body), note);
  addEventListener("hashchange", () => open());

  function choose(name) {
    order = name;
    ask();
  }

  async function ask() {
    if (isAsking) return;
    isAsking = true;
    const asked = order;
    try {
      list = (await get(`requests?limit=${LIMIT}&order=${asked}`)).requests;
    } catch (error) {
      // An older frontend has no such list; any other failure leaves the last one.
      if (error.status === 404) list = null;
    } finally {
      isAsking = false;
    }
    for (const button of buttons) button.classList.toggle("chosen", button.dataset.order === order);
    if (!list) return;
    const slowest = Math.max(1, ...list.map((item) => item.latency_ms ?? 0));
    keyed(body, list, ({ id }) => id, makeRow, (row, item) => updateRow(row, item, slowest, severityOf(item)));
    setText(note, list.length ? "" : `No ${ORDERS.indexOf(order) > 1 ? `${order} ` : ""}request is kept.`);
  }

  /** A row has the colour of the line at the top that is about such requests, if there is one. */
  function severityOf({ status }) {
    return state.snapshot?.wrong_now.find(({ kind }) => kind === `${status}-requests`)?.severity;
  }

  async function open() {
    const id = location.hash.startsWith(PREFIX) ? decodeURIComponent(location.hash.slice(PREFIX.length)) : null;
    for (const row of body.children) row.classList.toggle("chosen", row.dataset.id === id);
    detail.hidden = id === null;
    if (id === null) return;
    detail.dataset.id = id;
    try {
      const found = await get(`requests/${encodeURIComponent(id)}`);
      if (detail.dataset.id === id) detail.replaceChildren(...waterfall(found));
    } catch (error) {
      detail.replaceChildren(closing(), h("p", {}, `${id}: ${error.message}`));
    }
    detail.scrollIntoView({ block: "nearest" });
  }

  open();
  return () => {
    ask();
    return list !== null;
  };
}

function makeRow({ id }) {
  const cells = ["received", "id", "status", "place", "tokens", "first-token", "latency"];
  const row = h("tr", { "data-id": id, tabindex: "0" }, ...cells.map((name) => h("td", { class: name })));
  const show = () => (location.hash = PREFIX + encodeURIComponent(id));
  row.addEventListener("click", show);
  row.addEventListener("keydown", (event) => event.key === "Enter" && show());
  row.lastChild.append(h("span"), emptyBar());
  return row;
}

function updateRow(row, item, slowest, severity) {
  row.children[2].className = `status ${severity ?? ""}`;
  row.title = `${item.id} · ${item.model} · frontend ${item.frontend}${item.error ? ` · ${item.error}` : ""}`;
  const texts = [
    clock(item.received_unix),
    item.id,
    item.status,
    item.place ?? "",
    `${number(item.prompt_tokens)} → ${number(item.output_tokens)}`,
    milliseconds(item.ttft_ms),
  ];
  texts.forEach((text, at) => setText(row.children[at], text));
  setText(row.lastChild.firstChild, milliseconds(item.latency_ms));
  setWidth(row.querySelector(".fill"), (item.latency_ms ?? 0) / slowest);
}

function closing() {
  return h("button", { class: "close", title: "close", onclick: () => (location.hash = "") }, "×");
}

/** The request's spans as bars under the processes that they belong to, on one axis of milliseconds. */
function waterfall(request) {
  const spans = request.spans;
  const from = Math.min(0, ...spans.map((span) => Math.min(span.start_ms, span.end_ms)));
  const to = Math.max(request.latency_ms ?? 0, 0.001, ...spans.map((span) => Math.max(span.start_ms, span.end_ms)));
  const rows = request.processes.flatMap((process) => [
    h("h4", { class: process.role }, processTitle(process)),
    ...spans.filter((span) => span.process === process.name).map((span) => bar(span, from, to)),
  ]);
  const missing = request.unattributed_ms;
  if (missing != null) {
    const share = request.latency_ms ? ` (${number((100 * missing) / request.latency_ms, 1)} %)` : "";
    rows.push(h("p", { class: "unattributed" }, `unattributed: ${milliseconds(missing)}${share}`));
  }
  return [closing(), h("h3", {}, request.id), h("p", {}, facts(request)), h("div", { class: "spans" }, ...rows)];
}

function processTitle(process) {
  const clockText = process.clock_uncertainty_ms ? `, clock ± ${milliseconds(process.clock_uncertainty_ms)}` : "";
  const marks = process.has_marks ? clockText : ": no marks (an earlier release, or --no-request-marks)";
  return `${process.role} ${process.name}${marks}`;
}

function facts(request) {
  const { drafts, estimates, transfer } = request;
  const parts = [
    [request.status, request.place && `${request.place} prefill`, request.model].filter(Boolean).join(", "),
    `received ${clock(request.received_unix)}, first token ${milliseconds(request.ttft_ms)}, latency ${milliseconds(request.latency_ms)}`,
    `${number(request.prompt_tokens)} prompt and ${number(request.output_tokens)} answer tokens`,
    estimates ? `estimated: local ${seconds(estimates.local_s)}, remote ${seconds(estimates.remote_s)}` : "",
    transfer ? `transfer: ${bytes(transfer.bytes)} in ${number(transfer.descriptors)} descriptor${transfer.descriptors === 1 ? "" : "s"}` : "",
    drafts ? `speculation: ${number(drafts.drafted)} tokens drafted, ${number(drafts.accepted)} accepted` : "",
    request.error ?? "",
  ];
  return parts.filter(Boolean).join(" · ");
}

function bar(span, from, to) {
  const [start, end] = [Math.min(span.start_ms, span.end_ms), Math.max(span.start_ms, span.end_ms)];
  // Clocks differ by less than they are known: a span that ends before it begins is shown as such.
  const isNegative = span.end_ms < span.start_ms;
  const fill = h("span", { class: `fill ${isNegative ? "negative" : kind(span.phase)}` });
  fill.style.left = `${(100 * (start - from)) / (to - from)}%`;
  fill.style.width = `${(100 * (end - start)) / (to - from)}%`;
  const amount = milliseconds(span.end_ms - span.start_ms);
  const value = span.value == null ? "" : ` · ${valueText(span)}`;
  const isMoment = span.start_ms === span.end_ms;
  const length = span.phase === "run_queue" ? `in ${amount}` : amount;
  const note = `${isMoment ? `at ${milliseconds(start)}` : length}${value}${span.note ? ` · ${span.note}` : ""}`;
  const title = `${span.phase}: ${milliseconds(span.start_ms)} to ${milliseconds(span.end_ms)}, ${note}`;
  const cells = [h("span", { class: "phase" }, span.phase), h("span", { class: "track" }, fill), h("span", { class: "note" }, note)];
  return h("div", { class: "span", title }, ...cells);
}

/** What the value of a span counts, by its phase. */
function valueText({ phase, value }) {
  if (phase === "run_queue") return `${milliseconds(value)} without a core`;
  if (/byte|transfer|saved/.test(phase)) return bytes(value);
  return number(value, 1);
}

/** What a phase mostly is: waiting, computing, moving KV, or answering. */
function kind(phase) {
  if (phase === "run_queue") return "cores";
  if (/queue|wait|pull|claim|admi|submit|preempt/.test(phase)) return "waiting";
  if (/transfer|byte|attach|post|hand_over|send|fetch|load|save/.test(phase)) return "moving";
  if (/decod|token$|tokens$|late|answer/.test(phase)) return "decode";
  if (/prefill|comput|resume/.test(phase)) return "prefill";
  return "other";
}
