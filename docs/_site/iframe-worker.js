/* Search runs in a worker, which browsers refuse to pages that were opened as files. There, a hidden frame stands in. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const room = this.frame.contentWindow;
      room.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.ready = new Promise((resolve) => {
        const script = room.document.createElement("script");
        script.onload = resolve;
        script.src = new URL(url, location.href);
        room.document.body.append(script);
      });
    }

    postMessage(data) {
      const room = this.frame.contentWindow;
      this.ready.then(() => room.dispatchEvent(new room.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
