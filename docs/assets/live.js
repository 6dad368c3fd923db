// Sets the height of a live figure's frame to the height that its section reports.
const MAX_HEIGHT = 1400; // pixels

addEventListener("message", ({ data, source }) => {
  if (!Number.isFinite(data?.regardHeight)) return;
  for (const frame of document.querySelectorAll(".live iframe")) {
    if (frame.contentWindow === source) frame.style.height = `${Math.min(data.regardHeight + 2, MAX_HEIGHT)}px`;
  }
});
