// What the planner would change, and why: the one that decides, and how many stand by.

import { clock, h, keyed, milliseconds, number, percent, setText } from "./dom.js";
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
    setText(figures, action ? sentence(action.numbers) : "");
    return true;
  };
}

/** The charts have a dashed line at each of them. */
function makeChange({ unix_s, what, reason }) {
  return h("li", {}, h("b", {}, `${clock(unix_s)} ${what}`), ` · ${reason}`);
}

function sentence(numbers) {
  return [
    `${number(numbers.requests_per_s, 2)} requests/s`,
    `${number(numbers.uncached_tokens)} tokens to prefill, ${number(numbers.answer_tokens)} to answer`,
    `prefill ${percent(numbers.prefill_utilisation, 1)}, decode ${percent(numbers.decode_utilisation, 1)} used`,
    `expected: first token ${milliseconds(1e3 * numbers.ttft_s)}, between tokens ${milliseconds(1e3 * numbers.itl_s)}`,
  ].join(" · ");
}
