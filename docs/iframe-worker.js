// Search in pages that are opened as files: browsers start no workers there, so the script of the worker runs in a
// hidden frame, with the messages of a worker.
if (location.protocol === "file:") {
  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      inside.document.head.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.inside = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.srcdoc = "";
        frame.onload = async () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = async (...urls) => {
            for (const one of urls) await load(inside, one);
          };
          await load(inside, url);
          resolve(inside);
        };
        document.body.append(frame);
      });
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {}
  };
  window.IFrameWorker = window.Worker; // the search asks for this name to find its scripts
}
