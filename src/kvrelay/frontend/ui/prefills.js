// Where prefills ran and why, what hand-offs cost, where the KV of prompts was, and latencies by role, model and worker.

import { emptyBar, h, keyed, milliseconds, number, percent, setText, setWidth, table } from "./dom.js";

/** Workers beyond these are not listed: their roles and models are. */
const MAX_WORKERS = 48;
const KINDS = { role: "all of role", model: "all of model", group: "data-parallel group", worker: "" };

export function prefills(section) {
  const places = h("div", { class: "places" });
  const handoffs = h("p", { class: "handoffs" });
  const prompts = h("p", { class: "prompts" });
  const sessions = h("p", { class: "sessions" });
  section.append(places, handoffs, prompts, sessions);
  return ({ snapshot }) => {
    const total = snapshot?.total;
    const all = (total?.places ?? []).reduce((sum, { last_minute }) => sum + last_minute, 0);
    if (!all && !total?.prompt_tokens_last_minute) return false;
    const shown = total.places.filter(({ last_minute }) => last_minute);
    keyed(places, shown, ({ place }) => place, makePlace, (row, place) => updatePlace(row, place, all));
    setText(handoffs, handoffText(total.handoffs));
    setText(prompts, promptText(total));
    setText(sessions, sessionText(total));
    return true;
  };
}

function makePlace({ place, text }) {
  return h("div", { class: `where ${place === "remote" ? "prefill" : "decode"}` }, h("b", {}, place), emptyBar(), h("span", { class: "figures" }), h("small", {}, text));
}

function updatePlace(row, { last_minute }, all) {
  setWidth(row.querySelector(".fill"), last_minute / all);
  setText(row.querySelector(".figures"), `${number(last_minute)} in 1 min · ${percent(last_minute, all)}`);
}

function handoffText({ arrived, queue_ms, whole_ms, sending_ms }) {
  if (!arrived) return "No hand-off in the last minute.";
  return [
    `${number(arrived)} hand-offs in the last minute, on average ${milliseconds(whole_ms)} from sending a prefill away to its KV`,
    `${milliseconds(queue_ms)} of that until a prefill worker claimed it`,
    `KV still under way after the prefill: ${milliseconds(sending_ms)}`,
  ].join(" · ");
}

function sessionText({ sessions_paused: paused, sessions_last_minute: { returned, incomplete, tokens, saved_s } }) {
  if (!paused && !returned) return "";
  const names = { pool: "in the pool", host: "in host memory", disk: "on disk", peer: "at other workers", computed: "computed again" };
  const repeated = Object.entries(tokens).filter(([, count]) => count);
  return [
    `${number(paused)} sessions paused at workers, ${number(returned)} returned in the last minute (${number(incomplete)} had lost a part)`,
    ...repeated.map(([place, count]) => `${number(count)} tokens ${names[place] ?? place}`),
    `${saved_s.toFixed(1)} s saved`,
  ].join(" · ");
}

function promptText({ prompt_tokens_last_minute: all, cached_tokens_last_minute: cached, loaded_tokens_last_minute: loaded }) {
  const names = { host: "host memory", disk: "disk", peer: "other workers" };
  const beyond = Object.entries(loaded).filter(([, tokens]) => tokens);
  return [
    `${number(all)} prompt tokens in the last minute, ${number(cached)} of them cached (${percent(cached, all)})`,
    ...beyond.map(([medium, tokens]) => `${number(tokens)} read from ${names[medium] ?? medium}`),
  ].join(" · ");
}

export function latencies(section) {
  const body = h("tbody");
  const names = ["of", "prefills", "prefill p50", "p95", "p99", "answers", "first token p50", "p95", "p99", "between tokens p50", "p95", "p99"];
  const note = h("p", { class: "note" });
  section.append(table(names, body), note);
  return ({ snapshot }) => {
    const times = snapshot?.times ?? [];
    if (!times.length) return false;
    const workers = times.filter(({ kind }) => kind === "worker");
    const hidden = Math.max(workers.length - MAX_WORKERS, 0);
    const shown = times.slice(0, times.length - hidden);
    keyed(body, shown, ({ kind, name }) => `${kind} ${name}`, makeTimes(names.length), updateTimes);
    setText(note, hidden ? `and ${number(hidden)} more workers` : "");
    note.hidden = !hidden;
    return true;
  };
}

function makeTimes(width) {
  return ({ kind }) => h("tr", { class: kind }, ...Array.from({ length: width }, () => h("td")));
}

function updateTimes(row, { kind, name, prefills, prefill_ms, answers, ttft_ms, itl_ms }) {
  const three = ({ p50, p95, p99 }) => [p50, p95, p99].map(milliseconds);
  const texts = [`${KINDS[kind]} ${name}`.trim(), number(prefills), ...three(prefill_ms), number(answers), ...three(ttft_ms), ...three(itl_ms)];
  texts.forEach((text, at) => setText(row.children[at], text));
}
