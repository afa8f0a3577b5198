// Times and numbers as text.

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const two = (number) => String(number).padStart(2, "0");

/** Return a duration in at most six characters, as `holdfast queue` does: 45s, 12m03s, 2h05m, 3d04h. */
export function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < MINUTE) return `${whole}s`;
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)}m${two(whole % MINUTE)}s`;
  if (whole < DAY) return `${Math.floor(whole / HOUR)}h${two(Math.floor((whole % HOUR) / MINUTE))}m`;
  return `${Math.floor(whole / DAY)}d${two(Math.floor((whole % DAY) / HOUR))}h`;
}

/** Return date and time of the browser's time zone, to the second. */
export function moment(unixS) {
  const at = new Date(unixS * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(unixS)}`;
}

/** Return the time of day, to the second. */
export function clock(unixS) {
  const at = new Date(unixS * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** Return a count with its noun. */
export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** Return a size with its unit. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

/** Return the durations of a job now: in total, running and down, in seconds. */
export function durations(job, nowS) {
  const until = job.ended_unix_s ?? nowS;
  const since = job.as_of_unix_s === null ? 0 : Math.max(0, until - job.as_of_unix_s);
  return {
    total: until - job.submitted_unix_s,
    running: job.running_s + (job.grows === "running" ? since : 0),
    down: job.down_s + (job.grows === "down" ? since : 0),
  };
}
