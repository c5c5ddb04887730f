// What the planner would change, and why: the one that decides, and how many stand by.

import { clock, h, keyed, number, percent, seconds, setText } from "./dom.js";
import { processText } from "./fleet.js";

export function planner(section) {
  const state = h("p");
  const plan = h("p");
  const figures = h("p", { class: "detail" });
  const changes = h("ol", { class: "changes" });
  section.append(state, plan, figures, changes);
  return ({ snapshot }) => {
    const [leader, ...others] = snapshot?.planners ?? [];
    if (!leader) return false;
    const mode = leader.is_paused ? "paused" : leader.mode;
    const standing = others.length ? ` · ${number(others.length)} more stand by` : "";
    const held = leader.held.length ? ` · held by hand: ${leader.held.join(", ")}` : "";
    const used = leader.rss_bytes ? ` · ${processText(leader)}` : "";
    const changed = `${number(leader.num_changes)} changes`;
    setText(state, `${mode} · fleet ${leader.shape || "–"} · ${changed}${used}${standing}${held}`);
    const action = leader.actions[0];
    const what = action ? [action.type, action.worker_id, action.role].filter(Boolean).join(" ") : "";
    setText(plan, leader.problem || (action ? `${what}: ${action.reason}` : "nothing decided yet"));
    const done = snapshot.planners.flatMap((one) => one.changes ?? []).sort((one, other) => other.unix_s - one.unix_s);
    keyed(changes, done, (change) => `${change.unix_s} ${change.what}`, makeChange, () => {});
    setText(figures, action?.numbers.requests_per_s ? sentence(action.numbers, leader.measured) : "");
    return true;
  };
}

/** The charts have a dashed line at each of them. */
function makeChange({ unix_s, what, reason }) {
  return h("li", {}, h("b", {}, `${clock(unix_s)} ${what}`), ` · ${reason}`);
}

/** What the plan is made of, and its estimates beside what clients got in the last minute. */
function sentence(numbers, measured) {
  const beside = (name) => seconds(numbers[name]) + (measured ? ` (measured ${range(measured[name])})` : "");
  return [
    `${number(numbers.requests_per_s, 2)} requests/s`,
    `${number(numbers.uncached_tokens)} tokens to prefill, ${number(numbers.answer_tokens)} to answer`,
    `prefill ${percent(numbers.prefill_utilisation, 1)}, decode ${percent(numbers.decode_utilisation, 1)} used`,
    `expected: first token (p95) ${beside("ttft_s")}, between tokens ${beside("itl_s")}`,
  ].join(" · ");
}

/** A histogram's bucket; the last one is open. */
function range([from, to]) {
  return to < 1e9 ? `${seconds(from)} to ${seconds(to)}` : `more than ${seconds(from)}`;
}
